"""What a run remembers of lines: sets of numbers, ids used before."""

from spmd_serve.batch.seen import IdTable, LineSet, digest_of


def test_line_set() -> None:
    lines = LineSet()
    assert (len(lines), lines.highest(), 5 in lines) == (0, 0, False)
    assert lines.add(5) and lines.add(1) and lines.add(100_000)
    assert not lines.add(5)
    assert [number for number in (0, 1, 4, 5, 6, 99_999, 100_000, 10**9) if number in lines] == [
        1,
        5,
        100_000,
    ]
    assert (len(lines), lines.highest()) == (3, 100_000)
    lines.remove(100_000)
    assert (len(lines), lines.highest(), 100_000 in lines) == (2, 5, False)


def test_id_table_finds_every_second_use() -> None:
    ids = IdTable()
    count = 50_000
    assert all(ids.first_use(f"request-{number}", number) is None for number in range(1, count))
    assert all(ids.first_use(f"request-{number}", count + number) == number for number in range(1, count))
    assert ids.first_use("", 7) is None and ids.first_use("", 8) == 7


def test_digests_differ() -> None:
    assert digest_of(b"a") == digest_of(b"a") != digest_of(b"b")
