"""MLXDIST_CHECKSUM=1: damaged messages are retransmitted."""

import pytest
from native_build import NATIVE, SANITIZE_MEMORY, build_program, run_program


def test_crc32c(tmp_path):
    program = build_program(tmp_path / "checksum", [NATIVE / "tests" / "checksum_test.c"], SANITIZE_MEMORY)
    assert "checksum_test passed" in run_program(program)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_damaged_messages_are_sent_again(run_ranks, ranks):
    faults = "corrupt=1/50,truncate=1/50,drop=1/100"
    outputs = run_ranks("retransmission.py", ranks, faults, environment={"MLXDIST_CHECKSUM": "1"}, timeout=120)
    assert all("252 cases are exact" in output for output in outputs)


def test_all_ranks_must_agree(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "os.environ['MLXDIST_CHECKSUM'] = os.environ['MLXDIST_RANK']\n"
        "import mlxdist\n"
        "try:\n"
        "    mlxdist.init()\n"
        "except mlxdist.Mismatch as error:\n"
        "    print('refused:', error)\n"
    )
    for output in run_ranks(program, 2):
        assert "refused: " in output and "set MLXDIST_CHECKSUM alike on all" in output
