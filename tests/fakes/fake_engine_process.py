"""An engine process for supervision tests: a script that listens (or not), loads (or not) and dies as told.

Run as a script: `--host PATH.sock` or `--host H --port P`, and one mode from FAKE_MODE in the environment:
ready, slow (refused, then 503, then ready), exit1 (at once), hang (neither computes nor listens), flap (503 for a while after
it was ready), stubborn (ignores TERM), children (spawns a child of its own).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

REPLY = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def listen() -> socket.socket:
    host = argument("--host")
    if host.endswith(".sock"):
        server = socket.socket(socket.AF_UNIX)
        server.bind(host)
        server.listen(64)
        return server
    return socket.create_server((host, int(argument("--port"))))


def serve(server: socket.socket, status: list[bytes]) -> None:
    while True:
        conn, _ = server.accept()
        with conn, contextlib.suppress(OSError):
            if conn.recv(65536):
                conn.sendall(REPLY % status[0])


def main() -> None:
    mode = os.environ.get("FAKE_MODE", "ready")
    scale = float(os.environ.get("FAKE_SCALE", "1"))
    if os.environ.get("FAKE_PID_FILE"):
        Path(os.environ["FAKE_PID_FILE"]).write_text(str(os.getpid()))
    print(f"fake engine, mode {mode}", flush=True)
    if mode == "exit1":
        print("error: this model is broken", flush=True)
        sys.exit(1)
    if mode == "hang":
        signal.pause()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "children":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(os.environ["FAKE_CHILD_FILE"]).write_text(str(child.pid))
    status = [b"503 Service Unavailable" if mode == "slow" else b"200 OK"]
    if mode == "slow":
        time.sleep(5 * scale)
    threading.Thread(target=serve, args=(listen(), status), daemon=True).start()
    if mode == "slow":
        time.sleep(60 * scale)
        status[0] = b"200 OK"
    if mode == "flap":
        time.sleep(1.0 * scale)
        status[0] = b"503 Service Unavailable"
        time.sleep(10 * scale)
        status[0] = b"200 OK"
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
