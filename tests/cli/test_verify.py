"""`routebook verify`: what is changed in a record is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cli.records import with_ids, with_meta, without_rows, write


def totals(samples):
    return sum(s.record.num_rows for s in samples)


def test_an_honest_record_is_equal(run, record, samples):
    done = run("verify", record, "--model", "tiny")
    n = totals(samples)
    assert (done.status, done.out) == (
        0,
        f"verified: {n} rows x 6 layers, {n} equal, 0 different\n",
    )


@pytest.mark.parametrize(("position", "kind"), [(2, "prompt"), (33, "completion")])
def test_one_changed_id_is_named(run, samples, tmp_path, position, kind):
    computed = samples[1].record.ids_TLK[position, 4].tolist()
    stranger = next(expert for expert in range(16) if expert not in computed)
    recorded = [*computed[:3], stranger]
    changed = with_ids(samples[1], position, 4, recorded)
    path = write(tmp_path / "changed.routes", [samples[0], changed])
    done = run("verify", path, "--model", "tiny")
    n = totals(samples)
    assert done.status == 1
    assert done.out.splitlines() == [
        f"first difference: request 1.0, position {position} ({kind}), layer 4:"
        f" recorded {recorded}, computed {computed}",
        f"verified: {n} rows x 6 layers, {n - 1} equal, 1 different",
    ]


def test_the_first_of_several_differences_is_named_and_all_are_counted(run, samples, tmp_path):
    def other(sample, position, layer):
        ids = sample.record.ids_TLK[position, layer].tolist()
        return with_ids(sample, position, layer, [(ids[0] + 1) % 16, *ids[1:]])

    first = other(other(other(samples[0], 9, 5), 9, 2), 20, 0)
    path = write(tmp_path / "changed.routes", [first, other(samples[1], 1, 1)])
    done = run("verify", path, "--model", "tiny")
    n = totals(samples)
    difference, line = done.out.splitlines()
    assert "request 0.0, position 9 (prompt), layer 2:" in difference
    assert line == f"verified: {n} rows x 6 layers, {n - 3} equal, 3 different"
    assert done.status == 1


def test_another_order_of_the_same_experts(run, samples, tmp_path):
    ids = samples[0].record.ids_TLK[7, 3].tolist()
    path = write(tmp_path / "turned.routes", [with_ids(samples[0], 7, 3, ids[::-1])])
    n = totals(samples[:1])
    strict = run("verify", path, "--model", "tiny")
    assert strict.status == 1
    assert f"recorded {ids[::-1]}, computed {ids}" in strict.out
    loose = run("verify", path, "--model", "tiny", "--ignore-order")
    assert (loose.status, loose.out) == (
        0,
        f"verified: {n} rows x 6 layers, {n} equal, 0 different\n",
    )


def test_an_absent_row_is_a_failure(run, samples, tmp_path):
    path = write(tmp_path / "absent.routes", [samples[0], without_rows(samples[1], [5, 8])])
    done = run("verify", path, "--model", "tiny")
    n = totals(samples)
    assert done.status == 1
    assert done.out.splitlines() == [
        "first absent row: request 1.0, position 5 (prompt)",
        f"verified: {n} rows x 6 layers, {n - 2} equal, 0 different, 2 absent",
    ]


def test_an_absent_row_of_a_late_start_is_named_by_its_position(run, samples, tmp_path):
    record = samples[0].record
    late = replace(samples[0], record=record.slice(11, record.stop))
    path = write(tmp_path / "late.routes", [without_rows(late, [record.stop - 1])])
    first, _ = run("verify", path, "--model", "tiny").out.splitlines()
    assert first == f"first absent row: request 0.0, position {record.stop - 1} (completion)"


def test_a_record_that_starts_late_is_compared_at_its_positions(run, samples, tmp_path):
    record = samples[0].record
    late = replace(samples[0], record=record.slice(11, record.stop))
    done = run("verify", write(tmp_path / "late.routes", [late]), "--model", "tiny")
    n = record.num_rows - 11
    assert (done.status, done.out) == (
        0,
        f"verified: {n} rows x 6 layers, {n} equal, 0 different\n",
    )


def test_a_record_without_rows_proves_nothing(run, samples, tmp_path):
    record = samples[0].record
    path = write(
        tmp_path / "none.routes",
        [replace(samples[0], record=record.slice(record.stop, record.stop))],
    )
    done = run("verify", path, "--model", "tiny")
    assert done.status == 2
    assert f"{path} holds no row" in done.error


def test_samples_of_different_number_formats_need_a_decision(run, samples, tmp_path):
    mixed = [samples[0], with_meta(samples[1], dtype="bfloat16")]
    path = write(tmp_path / "mixed.routes", mixed)
    done = run("verify", path, "--model", "tiny")
    assert done.status == 2
    assert "bfloat16, float32; name one with --dtype" in done.error
    assert run("verify", path, "--model", "tiny", "--dtype", "float32").status == 0


def test_a_coarse_number_format_is_named_as_a_possible_cause(run, samples, tmp_path):
    ids = samples[0].record.ids_TLK[0, 0].tolist()
    changed = with_ids(samples[0], 0, 0, [(ids[0] + 1) % 16, *ids[1:]])
    path = write(tmp_path / "coarse.routes", [with_meta(changed, dtype="bfloat16")])
    *_, note, line = run("verify", path, "--model", "tiny", "--dtype", "float32").out.splitlines()
    assert note.startswith("note: in bfloat16, ")
    assert "--dtype float32" in note
    assert line.startswith("verified: ")


def test_the_weights_decide_not_the_name(run, samples, tmp_path):
    """A record that claims the right shape, but other weights, is refused."""
    path = write(tmp_path / "x.routes", [with_meta(samples[0], model_fingerprint="0" * 16)])
    done = run("verify", path, "--model", "tiny")
    assert done.status == 2
    assert "fingerprint 0000000000000000" in done.error
    assert "give the model that made it" in done.error
