"""The clients of examples/, run as their page says, against a real engine."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines import chat
from tests.support.served import LONG_REPLY, Served

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "How long is a day?"

Ran = tuple[int, str, str]
Ask = Callable[..., Ran]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Installed as its lock file says, in a copy, so that nothing stays in the sources."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing; on Debian and Ubuntu `scripts/setup dev` installs it")
    place = tmp_path_factory.mktemp("node")
    for name in ("examples", "proto"):
        ignored = shutil.ignore_patterns("node_modules")
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    install = ["npm", "ci", "--ignore-scripts", "--prefix", str(place / "examples" / "node")]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return ["node", str(place / "examples" / "node" / "chat.mjs")]


@pytest.fixture(params=["python", "node"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Runs an example; its exit code and what it wrote on both outputs."""
    if request.param == "node":
        program = request.getfixturevalue("node")
    else:
        program = [sys.executable, str(ROOT / "examples" / "python" / "chat.py")]

    def run(*words: str) -> Ran:
        ran = subprocess.run([*program, *words], capture_output=True, timeout=60, check=False)
        return ran.returncode, ran.stdout.decode(), ran.stderr.decode()

    return run


def test_a_reply_is_streamed_and_its_cost_told(served: Served, ask: Ask) -> None:
    ids, text, done = served.generate(prompt=chat(("user", QUESTION)), max_tokens=20)
    code, out, err = ask(str(served.engine.listen), QUESTION, "--max-tokens", "20")
    assert (code, out) == (0, text + "\n")
    assert f"token ids: {ids}\n" in err
    prompt = done.usage.prompt_tokens
    assert err.startswith(f"{prompt} prompt tokens, {prompt - 1} of them cached (exact); 20 tokens")


def test_leaving_early_frees_the_place(served: Served, ask: Ask) -> None:
    before = served.stats().cancelled
    words = ("--max-tokens", str(LONG_REPLY), "--cancel-after", "3")
    code, _, err = ask(str(served.engine.listen), QUESTION, *words)
    assert code == 0
    assert re.fullmatch(r"cancelled after \d+ tokens\n", err)
    served.wait_idle()
    assert served.stats().cancelled == before + 1


def test_ctrl_c_ends_the_python_one_without_a_traceback(served: Served) -> None:
    program = [sys.executable, str(ROOT / "examples" / "python" / "chat.py")]
    words = [str(served.engine.listen), QUESTION, "--max-tokens", str(LONG_REPLY)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*program, *words], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"stopped after \d+ tokens\n", err)
    served.wait_idle()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "other"], "NOT_FOUND: model: 'other' is not served here"),
        (["--max-tokens", "0"], "INVALID_ARGUMENT: max_tokens: 0"),
        (["--max-tokens", str(LONG_REPLY), "--seconds", "0.001"], "DEADLINE_EXCEEDED: "),
    ],
    ids=["not found", "invalid", "too late"],
)
def test_a_status_comes_with_what_to_do(
    served: Served, ask: Ask, words: list[str], said: str
) -> None:
    code, _, err = ask(str(served.engine.listen), QUESTION, *words)
    assert code == 1
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_no_engine_is_a_status_too(directory: Path, ask: Ask) -> None:
    code, _, err = ask(f"unix:{directory}/nobody.sock", QUESTION)
    assert code == 1
    assert err.startswith("UNAVAILABLE: ")
    assert "see that `engine serve` runs" in err


@pytest.mark.parametrize("path", [*(ROOT / "examples").rglob("chat.*")], ids=lambda path: path.name)
def test_an_example_uses_nothing_of_ours_but_the_proto(path: Path) -> None:
    text = path.read_text()
    assert "engine.proto" in text
    assert not re.search(r"^\s*(from|import) .*\b(engine|cachestore)\b(?!_pb2)", text, re.MULTILINE)
