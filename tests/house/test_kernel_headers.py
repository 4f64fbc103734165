# SPDX-License-Identifier: Apache-2.0
"""What the models of the kernels' warps read from the kernels' headers: a constant that changes is
seen, and one that is not there any more is named.
"""

import shutil

import pytest
from kernel_headers import SM90, Headers, Missing, choices


def changed(folder, header, old, new):
    """The headers, with one change."""
    shutil.copytree(SM90, folder / "sm90")
    path = folder / "sm90" / header
    text = path.read_text()
    assert old in text, f"{header} has no `{old}` to change"
    path.write_text(text.replace(old, new))
    return Headers(folder / "sm90")


def readers(headers):
    return headers.constant("row_gemm_config.cuh", "kQueueReaders", of="RowGemmConfig",
                            kGather=True, kFinished=False, kCoded=False)


def test_a_changed_constant_is_seen(tmp_path):
    headers = changed(tmp_path, "row_producer.cuh", "kMeet = 8;", "kMeet = 2 * kClusterSize;")
    assert headers.constant("row_producer.cuh", "kMeet", of="RowProducer") == 4


def test_a_changed_expression_is_seen(tmp_path):
    headers = changed(tmp_path, "row_gemm_config.cuh", "(kFinished ? 4 : 1) + kSideLoader +",
                      "(kFinished ? 4 : 1) +")
    assert readers(headers) == readers(Headers()) - 1


def test_a_missing_constant_is_named(tmp_path):
    headers = changed(tmp_path, "row_producer.cuh", "kMeet", "kGather")
    with pytest.raises(Missing, match=r"row_producer\.cuh: no constexpr kMeet in RowProducer"):
        headers.constant("row_producer.cuh", "kMeet", of="RowProducer")
    with pytest.raises(Missing, match=r"row_producer\.cuh: nothing that matches `never"):
        headers.find("row_producer.cuh", r"never (\d+)")
    with pytest.raises(Missing, match=r"no header never\.cuh"):
        headers.constant("never.cuh", "kMeet")


def test_a_missing_part_of_an_expression_is_named(tmp_path):
    headers = changed(tmp_path, "tile_ring.cuh", "kConsumerWarps = 8", "kMultipliers = 8")
    with pytest.raises(Missing, match="uses kConsumerWarps"):
        readers(headers)


@pytest.mark.parametrize("cpp, value", [
    ("1 ? 2 : 3", 2), ("0 ? 2 : 3", 3), ("1 + (0 ? 2 : 3) * 4", 13), ("0 ? 1 : 0 ? 2 : 5", 5),
    ("2 > 1 ? (0 ? 7 : 8) : 9", 8), ("(1) + 2", 3)])
def test_choices_are_those_of_cpp(cpp, value):
    assert eval(choices(cpp)) == value
