"""Connections made within the block have room for whole messages; others are left alone."""

import os
import socket

from gpp_plugin.runtime.messages.sockets import BUFFER_BYTES, widen_open_sockets, widened_sockets


def connect():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def receive_buffer(end):
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def test_only_new_connections_are_widened():
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        most = receive_buffer(probe)  # what this machine allows
    old = connect()
    usual = [receive_buffer(end) for end in old]
    with widened_sockets():
        new = connect()
    assert [receive_buffer(end) for end in old] == usual
    assert all(receive_buffer(end) == most for end in new)
    widen_open_sockets()
    assert all(receive_buffer(end) == most for end in old)
    for end in (*old, *new):
        end.close()


def test_what_is_no_connection_is_passed_over(tmp_path):
    with (tmp_path / "file").open("w") as file, socket.socket(type=socket.SOCK_DGRAM):
        before = len(os.listdir("/proc/self/fd"))
        with widened_sockets():
            again = os.dup(file.fileno())
        widen_open_sockets()
        os.close(again)
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left open"
        file.write("still open")
    assert (tmp_path / "file").read_text() == "still open"
