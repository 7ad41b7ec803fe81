"""Becomes the engine, after asking the kernel to kill it with its parent. Run as a script: SHIM PARENT_PID PROGRAM ARGS...

Law: standard library only, no import of ours: it runs isolated, for a few milliseconds, in the engine's process. The request
survives exec. The parent-death signal follows the *thread* that spawned this process, which is why that thread waits for it.
"""

import ctypes
import errno
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the program; exit 127 with the reason when that is impossible."""
    parent, program, args = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(program, args)  # noqa: S606 - no shell is wanted
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a portable executable that only a shell knows how to start
            os.execv("/bin/sh", ["/bin/sh", *args])  # noqa: S606 - its own loader script, without interpretation of arguments
        print(f"cannot run {program}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
