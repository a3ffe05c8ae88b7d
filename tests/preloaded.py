"""
Commands that are typed, as forks of a process that has imported what takes most of their time: PyTorch, transformers.

Nothing of this project is imported before the fork, so each command finds a process as a new one would be.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SERVER = """
import json, os, runpy, signal, socket, sys
import av, datasets, matplotlib.pyplot, peft, torch, torchvision, transformers
from transformers import GenerationMixin, PreTrainedModel, ProcessorMixin, Trainer

def take_request():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    print(flush=True)
    while True:
        connection, _ = server.accept()
        descriptors = socket.recv_fds(connection, 1, 3)[1]
        if os.fork():
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if command := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
            connection.sendall(str(status).encode())
            os._exit(0)
        name, arguments, folder, environment = json.load(connection.makefile())
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        connection.close()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        return name, arguments

server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
name, arguments = take_request()
server.close()
if name == "stts-hf":
    arguments = ["-m", "stts_hf.cli.main", *arguments]
option, *rest = arguments
del server, take_request, name
if option == "-c":
    sys.argv = ["-c", *rest[1:]]
    exec(rest[0], {"__name__": "__main__"})
elif option == "-m":
    sys.argv = rest
    sys.path[0] = os.getcwd()
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(option))
    runpy.run_path(option, run_name="__main__")
"""
CLIENT = """#!{python} -IS
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
socket.send_fds(connection, [b"."], [0, 1, 2])
request = [os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]
connection.sendall(json.dumps(request).encode())
connection.shutdown(socket.SHUT_WR)
status = connection.recv(16)
sys.exit(int(status or 1) % 256)
"""


@contextlib.contextmanager
def preloaded(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Gives the environment with another `stts-hf` and `python` in its PATH."""
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket
        address = f"{folder}/server"
        for name in ("stts-hf", "python"):
            (client := Path(folder, name)).write_text(CLIENT.format(python=sys.executable, address=address))
            client.chmod(0o755)
        command = [sys.executable, "-c", SERVER, address]
        with subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "\n"
            try:
                yield {**environment, "PATH": f"{folder}:{environment['PATH']}"}
            finally:
                server.kill()
