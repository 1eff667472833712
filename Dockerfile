# The program in a container: see docs/containers.md.
#
#   docker build -t impala .
#   docker build -t impala:gpu --build-arg GPU=true .

# DeepMind Lab is built for one version of Python: take the same here. Debian's
# release is named, since a later one has no libosmesa6.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

ENV PYTHONUNBUFFERED=1
WORKDIR /impala

# A number, by which Kubernetes can tell that it is not root's. A new volume
# mounted on runs/ takes over its owner and group. Group 0 may do all that the
# owner may: some platforms (OpenShift) choose another user, in that group.
ENV HOME=/home/impala
RUN useradd --uid 10001 --gid 0 --home-dir "$HOME" --create-home impala \
  && install --directory --owner=10001 runs \
  && chgrp -R 0 "$HOME" runs \
  && chmod -R g=u "$HOME" runs

# What changes least comes first: a change of the code installs nothing again.
ARG GPU=false
COPY requirements.txt .
RUN if [ "$GPU" = true ]; then set -- 'tensorflow[and-cuda]'; fi \
  && pip install --no-cache-dir --root-user-action=ignore \
    -r requirements.txt "$@"

# DeepMind Lab, if its wheel lies in wheels/: it renders by OSMesa, loads SDL,
# and calls zip for each map that it compiles. Its wheel does not name dm-env and
# setuptools, which it imports. Importing it shows a wheel for another Python. A
# mount would spare the copy, but not all builders see it change.
COPY wheels /wheels
# Debian's release and the wheel itself hold the versions still.
# hadolint ignore=DL3008,DL3013
RUN wheel=$(find /wheels -iname 'deepmind_lab*.whl') \
  && if [ -n "$wheel" ]; then \
    apt-get update \
    && apt-get install --yes --no-install-recommends \
      libosmesa6 libsdl2-2.0-0 zip \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir --root-user-action=ignore \
      "$wheel" dm-env setuptools \
    && python -c 'import deepmind_lab'; \
  fi

COPY configs configs
COPY cluster cluster
COPY envs envs
COPY evaluation evaluation
COPY examples examples
COPY runtime runtime
COPY *.py ./

USER 10001:0

# Process 1 is the program itself: SIGTERM reaches it, and it saves.
ENTRYPOINT ["python", "experiment.py"]

# No HEALTHCHECK: neither a run on one machine nor an actor has a port to ask,
# and what fails ends by itself. compose.yaml and kubernetes/ ask the learner's.
