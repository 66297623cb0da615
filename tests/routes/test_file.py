from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import ConfigError, DamagedError, FormatError, RequestError, TruncatedError
from routebook.routes import CODEC_NAMES, RoutesWriter, encode_frame, read_routes
from tests.routes.strategies import make_record, make_sample, samples


@pytest.fixture
def three(tmp_path):
    """A file of three samples, and where its frames begin and end."""
    path = tmp_path / "run.routes"
    written = [make_sample(5 + i, seed=i, request_id=str(i)) for i in range(3)]
    with RoutesWriter(path) as writer:
        for sample in written:
            writer.write(sample)
    edges = [0]
    for sample in written:
        edges.append(edges[-1] + len(encode_frame(sample, checksum=True)))
    return path, written, edges


@given(st.lists(samples(), min_size=1, max_size=4), st.sampled_from(CODEC_NAMES))
def test_samples_come_back_in_order(tmp_path_factory, written, codec):
    path = tmp_path_factory.mktemp("files") / "run.routes"
    with RoutesWriter(path, codec) as writer:
        for sample in written:
            writer.write(sample)
        assert writer.num_samples == len(written)
    assert list(read_routes(path)) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["run.routes"]


def test_a_file_is_nothing_but_its_frames(three):
    path, written, edges = three
    assert path.stat().st_size == edges[-1]
    assert path.read_bytes() == b"".join(encode_frame(s, checksum=True) for s in written)


def write_and_interrupt(path) -> None:
    with RoutesWriter(path) as writer:
        writer.write(make_sample(9))
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_what_was_there_before(three):
    path, written, _ = three
    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt(path)
    assert list(read_routes(path)) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["run.routes"]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "run.routes"
    with RoutesWriter(path) as writer:
        writer.write(make_sample())
        assert not path.exists()
        assert not list(tmp_path.glob("*.routes"))
    assert path.exists()


def test_a_run_without_samples_makes_no_file(tmp_path):
    with pytest.raises(RequestError, match="no sample"), RoutesWriter(tmp_path / "a.routes"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "codec", "word"),
    [
        ("run.bin", "raw", r"run.bin does not end in \.routes"),
        ("run", "raw", "does not end"),
        ("no/run.routes", "raw", "no folder .*no; make it"),
        ("run.routes", "lz4", "lz4"),
    ],
)
def test_a_target_that_cannot_work_is_refused_before_anything_runs(tmp_path, name, codec, word):
    with pytest.raises(ConfigError, match=word):
        RoutesWriter(tmp_path / name, codec)


def test_writing_outside_the_block_is_refused(tmp_path):
    with pytest.raises(RequestError, match="with RoutesWriter"):
        RoutesWriter(tmp_path / "run.routes").write(make_sample())


def test_an_empty_file_is_an_error(tmp_path):
    path = tmp_path / "run.routes"
    path.touch()
    with pytest.raises(TruncatedError, match=r"run\.routes is empty"):
        next(read_routes(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.routes"):
        next(read_routes(tmp_path / "absent.routes"))


def read_until_error(path) -> tuple[list, FormatError]:
    read = []
    try:
        for sample in read_routes(path):
            read.append(sample)
    except FormatError as error:
        return read, error
    pytest.fail("the file was read without an error")


def test_every_cut_of_a_file_is_noticed_and_the_samples_before_it_are_read(three):
    path, written, edges = three
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length in edges:
            assert list(read_routes(path)) == written[: edges.index(length)]
            continue
        read, error = read_until_error(path)
        number = sum(edge <= length for edge in edges)
        assert isinstance(error, TruncatedError)
        assert read == written[: number - 1]
        assert f"{path}: frame {number}, at byte {edges[number - 1]}:" in str(error)
        assert "generate it anew" in str(error)


def test_every_damaged_byte_of_a_file_is_noticed_in_its_frame(three):
    path, written, edges = three
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        read, error = read_until_error(path)
        number = sum(edge <= at for edge in edges)
        assert read == written[: number - 1]
        assert f"frame {number}, at byte {edges[number - 1]}:" in str(error)


def test_bytes_between_frames_are_noticed(three):
    path, written, edges = three
    path.write_bytes(path.read_bytes() + b"\n")
    read, error = read_until_error(path)
    assert read == written
    assert f"frame 4, at byte {edges[-1]}: this is no frame" in str(error)


@pytest.mark.parametrize(
    ("frame", "word"),
    [
        (encode_frame(make_sample()), "no checksum"),
        (encode_frame(make_record(), checksum=True), "bare record"),
        (b"PK\3\4" + bytes(100), "no frame of routed experts"),
    ],
)
def test_something_else_than_checksummed_samples_is_refused(tmp_path, frame, word):
    path = tmp_path / "run.routes"
    path.write_bytes(frame)
    with pytest.raises(FormatError, match=f"frame 1, at byte 0: .*{word}") as caught:
        next(read_routes(path))
    assert not isinstance(caught.value, DamagedError | TruncatedError)


def test_a_length_that_is_a_lie_is_not_believed(tmp_path):
    path = tmp_path / "run.routes"
    frame = bytearray(encode_frame(make_sample(), checksum=True))
    frame[10:18] = (2**60).to_bytes(8, "little")
    path.write_bytes(frame)
    with pytest.raises(TruncatedError, match="bytes long, but the file ends"):
        next(read_routes(path))
