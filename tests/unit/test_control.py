"""Commands from another shell: progress, ends, refusals, and who may not come in."""

import asyncio
import os
import stat
import struct

import pytest

from blockferry.cluster import control
from blockferry.cluster.control import ControlError, open_control
from blockferry.engine.errors import BlockferryError


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / ("long" * 30)  # longer than the name of a socket may be
    return folder / "deployment.sock"


async def count(arguments, tell):
    for number in range(arguments["to"]):
        tell(f"at {number}")
    return "counted"


async def refuse(arguments, tell):
    raise BlockferryError("that cannot be")


async def wait_for_ever(arguments, tell):
    await asyncio.Event().wait()


HANDLERS = {"count": count, "refuse": refuse, "wait": wait_for_ever}


async def given(path, name, arguments):
    """What a command ends with, and what was heard before."""
    heard = []
    return await asyncio.to_thread(control.command, path, name, arguments, heard.append), heard


async def test_a_command_tells_how_far_it_is_and_how_it_ended(path):
    async with open_control(path, HANDLERS):
        assert await given(path, "count", {"to": 2}) == ("counted", ["at 0", "at 1"])


async def test_a_refusal_is_told(path):
    async with open_control(path, HANDLERS):
        with pytest.raises(ControlError, match="that cannot be"):
            await given(path, "refuse", {})


async def test_an_unknown_command_is_refused(path):
    async with open_control(path, HANDLERS):
        with pytest.raises(ControlError, match="'dance' is unknown"):
            await given(path, "dance", {})


async def test_the_socket_is_the_users_own_and_gone_afterwards(path):
    async with open_control(path, HANDLERS):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not path.exists()


async def test_another_user_is_refused(path, monkeypatch):
    monkeypatch.setattr(control, "peer_uid", lambda _connection: os.getuid() + 1)
    async with open_control(path, HANDLERS):
        with pytest.raises(ControlError, match=r"user \d+ may not command"):
            await given(path, "count", {"to": 1})


async def test_nobody_there_is_one_clear_error(path):
    path.parent.mkdir()
    with pytest.raises(ControlError, match="takes no commands"):
        await given(path, "count", {"to": 1})


async def test_an_end_amid_a_command_is_told(path):
    async with open_control(path, HANDLERS):
        waiting = asyncio.ensure_future(given(path, "wait", {}))
        await asyncio.sleep(0.2)
    with pytest.raises(ControlError, match="has ended meanwhile"):
        await waiting


@pytest.mark.parametrize(
    "line", [b"\n", b"[]\n", b'{"command": 1}\n', b"\xff\xfe\n", struct.pack("8s", b"x" * 8) + b"\n"]
)
async def test_garbage_is_refused(path, line):
    async with open_control(path, HANDLERS):
        with control._short(path) as name:
            reader, writer = await asyncio.open_unix_connection(name)
        writer.write(line)
        answer = await reader.readline()
        assert b"that was no command" in answer
        writer.close()
        await writer.wait_closed()
