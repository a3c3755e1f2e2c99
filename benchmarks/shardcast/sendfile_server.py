"""The plain HTTP hop's server: one file, sendfile, nothing else. Prints its port.

sendfile_server.py FILE
"""

import os
import socket
import sys
import threading


def answer(connection: socket.socket, path: str) -> None:
    """Answer every request of a connection with the file."""
    with connection:
        while connection.recv(65536):
            with open(path, "rb") as file:
                left = os.fstat(file.fileno()).st_size
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left)
                offset = 0
                while left:
                    sent = os.sendfile(connection.fileno(), file.fileno(), offset, left)
                    offset, left = offset + sent, left - sent


def main() -> None:
    """Serve until killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=answer, args=(connection, sys.argv[1]), daemon=True).start()


if __name__ == "__main__":
    main()
