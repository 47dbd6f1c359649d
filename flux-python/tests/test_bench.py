"""The measurement of whole layers, on a model small enough for the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

PATIENCE = 300
MODES = ["none", "ar", "one_shot", "two_shot", "sp", "async_tp", "flux"]


ROOT = Path(__file__).parents[2]
MARK = "<!-- python -m flux_tp.bench show "


def bench(*words, folder=ROOT):
    command = [sys.executable, "-m", "flux_tp.bench", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny-layers.json"
    few = ["--layers", "2", "--samples", "2", "--time-limit", "220"]
    bench("layers", "--models", "tiny", "--ms", "16,5", "--transport", "host", "--tp", "2", *few, "--json", str(path))
    return path


def test_every_mode_is_measured_or_says_why_not(record):
    content = json.loads(record.read_text())
    assert (content["transport"], content["layers"], content["device"]) == ("host", 2, "cpu")
    rows = content["rows"]
    assert [(row["phase"], row["m"]) for row in rows] == [(phase, m) for phase in ("prefill", "decode", "train") for m in (16, 5)]
    for row in rows:
        expected = {"none", "ar", "flux"} | ({"sp"} if row["m"] == 16 else set())
        assert set(row["ms"]) == expected and all(ms > 0 for ms in row["ms"].values()), row
        assert set(row["ms"]) | set(row["why"]) == set(MODES), row
    assert rows[1]["why"]["sp"] == "m = 5 is not a multiple of 2"


def test_results_are_compared_with_fp32(record):
    for row in json.loads(record.read_text())["rows"]:
        assert row["verified"], row
        assert 0 < row["error"]["flux"] <= row["largest_error"], row
        # Without collectives results are wrong, and the comparison sees it.
        assert row["error"]["none"] > 10 * row["largest_error"], row


def test_a_record_is_shown_as_tables(record):
    shown = bench("show", str(record))
    assert "tiny, prefill, TP 2, ms a layer" in shown and "| share hidden |" in shown
    for row in json.loads(record.read_text())["rows"]:
        assert f"| {row['m']} | {row['ms']['none']:.3f} | {row['ms']['ar']:.3f} |" in shown


def foreign_lines(document, folder):
    """Lines of a document's marked tables that the command in the mark does not print."""
    lines = []
    for part in document.split(MARK)[1:]:
        words, rest = part.split(" -->", 1)
        printed = bench("show", *words.split(), folder=folder).splitlines()
        table = rest.lstrip().split("\n\n", 1)[0].splitlines()
        lines += [line for line in table if line not in printed]
    return lines


def test_tables_of_documents_are_those_of_records(record):
    table = [line for line in bench("show", "--summary", str(record)).splitlines() if line.startswith("|")]
    right = f"{MARK}--summary {record.name} -->\n\n" + "\n".join(table) + "\n\ntext\n"
    assert foreign_lines(right, record.parent) == []
    wrong = table[2].replace("| 16 |", "| 17 |")
    assert foreign_lines(right.replace(table[2], wrong), record.parent) == [wrong]
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        if path.exists():
            assert foreign_lines(path.read_text(), ROOT) == [], path


def test_unknown_words_are_refused():
    ended = subprocess.run([sys.executable, "-m", "flux_tp.bench", "layers", "--modes", "magic"], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "'magic' is none of none, ar," in ended.stderr
