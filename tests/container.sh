#!/usr/bin/env bash
# Trains CartPole in containers, a learner and two actors, and stops it.
#
#   tests/container.sh            builds the image, then tests it
#   tests/container.sh IMAGE      tests an image that is there already
#
# Needs Docker or Podman, and minutes; so .ci/run leaves it out. Leaves only the
# image behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "tests/container.sh: $*" >&2
  exit 1
}

for engine in docker podman none; do
  if "$engine" info >/dev/null 2>&1; then break; fi
done
[ "$engine" != none ] || fail 'neither Docker nor Podman answers here'

image=${1:-impala}
[ $# -gt 0 ] || "$engine" build --tag "$image" .

run=impala-test-$$
clean_up() {
  "$engine" rm --force $run-{learner,actor0,actor1} >/dev/null 2>&1 || true
  "$engine" network rm $run >/dev/null 2>&1 || true
  "$engine" volume rm $run >/dev/null 2>&1 || true
}
trap clean_up EXIT
"$engine" network create --internal $run >/dev/null
"$engine" volume create $run >/dev/null

start() {  # The container's short name, then what it is told.
  local name=$1 folder=()
  shift
  # As in compose.yaml: no actor writes anything.
  [ "$name" != learner ] || folder=(--volume "$run:/impala/runs")
  "$engine" run --detach --name "$run-$name" --network $run \
    --network-alias "$name" --read-only --tmpfs /tmp --cap-drop ALL \
    "${folder[@]}" "$image" \
    --flagfile=configs/cartpole.flags --logdir=runs/test --envs_per_actor=2 \
    --batch_size=2 --log_every_secs=1 --save_checkpoint_secs=100000 \
    --learner_hosts=learner:2222 --num_actors=2 "$@" \
    >/dev/null
}

wait_for() {  # What is awaited, seconds, then the command that tells.
  local what=$1 seconds=$2
  shift 2
  for ((; seconds > 0; seconds--)); do
    if "$@" >/dev/null 2>&1; then
      echo "ok: $what"
      return
    fi
    sleep 1
  done
  for name in learner actor0 actor1; do
    "$engine" logs "$run-$name" >&2 || true
  done
  fail "not in time: $what"
}

in_learner() { "$engine" exec $run-learner "$@"; }
log_has() { [[ $("$engine" logs "$run-$1" 2>&1) == *"$2"* ]]; }
count_points() { in_learner grep -c losses/total runs/test/metrics.jsonl; }
has_learnt_more() { (($(count_points) > $1)); }

start actor0 --job_name=actor --task=0
start learner --job_name=learner --task=0
start actor1 --job_name=actor --task=1
wait_for 'the learner serves its port' 120 \
  in_learner bash -c ': < /dev/tcp/127.0.0.1/2222'
for name in actor0 actor1; do
  wait_for "$name plays" 120 log_has "$name" 'Playing for the learner'
done
wait_for 'the learner learns' 120 has_learnt_more 0

[ "$(in_learner id -u)" = 10001 ] || fail 'the user is not 10001'
in_learner grep -qa '^python.experiment.py' /proc/1/cmdline ||
  fail 'process 1 is not the program'
if in_learner ls runs/test/checkpoints/checkpoint >/dev/null 2>&1; then
  fail 'there is a checkpoint already: the stop would prove nothing'
fi

stop() {  # Expects a container to end in good order, with work left.
  "$engine" stop --time 60 "$run-$1" >/dev/null
  local code
  code=$("$engine" inspect --format '{{.State.ExitCode}}' "$run-$1")
  [ "$code" = 75 ] || fail "SIGTERM ends $1 with exit code $code"
  echo "ok: SIGTERM ends $1"
}

points=$(count_points)
stop learner
log_has learner Saved || fail 'the learner did not save'
"$engine" start $run-learner >/dev/null
wait_for 'the learner goes on from there' 120 log_has learner 'continuing from'
wait_for 'it learns from the same actors' 120 has_learnt_more "$points"
stop actor0
stop actor1
stop learner

# Also for a user that the image does not know, as on OpenShift.
for user in 10001:0 12345:0; do
  "$engine" run --rm --network none --user $user \
    --volume "$run:/impala/runs" "$image" \
    --flagfile=configs/cartpole.flags --logdir="runs/$user" \
    --envs_per_actor=2 --total_environment_frames=2000
  "$engine" run --rm --network none --user $user \
    --volume "$run:/impala/runs" --entrypoint bash "$image" \
    -c 'touch ~/file && [ "$(id -g)" = 0 ]'
  "$engine" run --rm --network none --user $user \
    --volume "$run:/impala/runs" "$image" \
    --mode=test --logdir="runs/$user" --test_num_episodes=2
  echo "ok: user $user trains and tests"
done
"$engine" run --rm --network none --volume "$run:/impala/runs" "$image" \
  --mode=test --logdir=runs/test --test_num_episodes=2
echo 'ok: the checkpoint plays'
