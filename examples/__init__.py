"""Tasks to try the program with, and to copy from."""

import pkgutil

# A user may have a folder of this name, too. Its modules are found as well.
__path__ = pkgutil.extend_path(__path__, __name__)
