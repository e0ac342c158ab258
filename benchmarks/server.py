"""Side by side with mlx-lm's own server: the same weights, prompts, prefill step and machine.

    python -m benchmarks.server [--model smollm2] [--step 256] [--runs 3] [--only NAME ...]

Both servers run all the while, and are asked in turn, so that what else the machine does meets
both. Greedy, and in the weights' dtype after loading (float32 on a CPU). Prompts are chats; each
run has its own, so that nothing is cached from an earlier one.

    alone          one request behind a cold prefix, then another question behind it
    chat           ten turns, each with the replies before it
    concurrent     1, 4 and 8 chats (--at-once) that have nothing in common, at once
    crowd          8 questions (the most of --at-once) at once behind one cold prefix
    restart        the server is killed (SIGKILL): one question, then 8, behind an old prefix
    conversations  24 of four turns behind one prefix, 8 at a time, in turn
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measure import Columns, flags, median, progress, publish, seconds
from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from tests.support.daemons import short_directory  # noqa: E402
from tests.support.models import save_tiny_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.contenders import Answered, Contender, contenders  # noqa: E402
from engine.model import ModelSpec, load  # noqa: E402

WORDS = (
    *("ferry", "pier", "harbour", "ticket", "island", "lighthouse", "crown", "bicycle", "morning"),
    *("evening", "storm", "captain", "market", "north", "quay", "lantern", "engine", "cargo"),
    *("passenger", "window", "bridge", "letter", "garden", "winter"),
)


@dataclass(frozen=True, slots=True)
class Size:
    prefix_tokens: int
    chat_prompt_tokens: int
    reply_tokens: int
    chat_turns: int
    concurrent: tuple[int, ...]
    conversations: int
    turns: int


FULL = Size(1000, 200, 64, 10, (1, 4, 8), 24, 4)
SMALL = Size(150, 40, 6, 3, (1, 3), 4, 2)
# How many conversations are under way at a time.
AT_A_TIME = 8


class Talk:
    """A chat as a client keeps it: each question is asked behind the replies before it."""

    def __init__(self, system: str, reply_tokens: int) -> None:
        self._messages = [{"role": "system", "content": system}]
        self._reply_tokens = reply_tokens

    def ask(self, contender: Contender, question: str) -> Answered:
        self._messages.append({"role": "user", "content": question})
        answered = contender.ask(self._messages, self._reply_tokens)
        self._messages.append({"role": "assistant", "content": answered.text})
        return answered


@dataclass(frozen=True, slots=True)
class Trial:
    """One scenario of one run. `answers` in the order of the requests."""

    answers: tuple[Answered, ...]
    seconds: float


class Prompts:
    """Texts of given lengths, the same for the same seed."""

    def __init__(self, model: Path, size: Size, seed: Sequence[int]) -> None:
        self.size = size
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._draw = np.random.default_rng(seed)

    def text(self, tokens: int) -> str:
        words = self._draw.choice(WORDS, 2 * tokens)
        numbers = self._draw.integers(0, 10_000, 2 * tokens)
        text = " ".join(f"{word} {n}" for word, n in zip(words, numbers, strict=True))
        return str(self._tokenizer.decode(self._tokenizer.encode(text).ids[:tokens]))

    def talk(self, system: str) -> Talk:
        return Talk(system, self.size.reply_tokens)

    def question(self) -> str:
        return f"Tell a long story about the {self.text(4)}."


def at_once(contender: Contender, prompts: Prompts, talks: Sequence[Talk]) -> Trial:
    """The next question in each of these chats, all at the same time."""
    questions = [prompts.question() for _ in talks]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(talks)) as pool:
        asked = pool.map(lambda talk, text: talk.ask(contender, text), talks, questions)
        answers = tuple(asked)
    return Trial(answers, time.perf_counter() - began)


# Names and trials; both servers are asked the same.
Scenario = Callable[[Contender, Prompts], Iterator[tuple[str, Trial]]]


def alone(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    system = prompts.text(prompts.size.prefix_tokens)
    for name in ("cold", "warm"):
        yield name, at_once(contender, prompts, [prompts.talk(system)])


def chat(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    talk = prompts.talk(prompts.text(prompts.size.prefix_tokens))
    trials = [at_once(contender, prompts, [talk]) for _ in range(prompts.size.chat_turns)]
    answers = tuple(answer for trial in trials for answer in trial.answers)
    yield f"chat of {len(trials)} turns", Trial(answers, sum(trial.seconds for trial in trials))


def concurrent(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    for count in prompts.size.concurrent:
        systems = [prompts.text(prompts.size.chat_prompt_tokens) for _ in range(count)]
        talks = [prompts.talk(system) for system in systems]
        yield f"{count} cold at once", at_once(contender, prompts, talks)


def crowd(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    count = max(prompts.size.concurrent)
    system = prompts.text(prompts.size.prefix_tokens)
    talks = [prompts.talk(system) for _ in range(count)]
    yield f"{count} on one cold prefix", at_once(contender, prompts, talks)


def restart(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    count = max(prompts.size.concurrent)
    for asked, name in ((1, "1 on a prefix, restarted"), (count, f"{count} on one, restarted")):
        system = prompts.text(prompts.size.prefix_tokens)
        at_once(contender, prompts, [prompts.talk(system)])
        contender.restart()
        talks = [prompts.talk(system) for _ in range(asked)]
        yield name, at_once(contender, prompts, talks)


def conversations(contender: Contender, prompts: Prompts) -> Iterator[tuple[str, Trial]]:
    size = prompts.size
    system = prompts.text(size.prefix_tokens)
    talks = [prompts.talk(system) for _ in range(size.conversations)]
    name = f"{len(talks)} conversations of {size.turns} turns"
    asked: dict[Talk, Future[Answered]] = {}
    answers: list[Future[Answered]] = []
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        # Every turn of all before the next turn of any: what is held of one outlives the others.
        for _ in range(size.turns):
            for talk in talks:
                before, question = asked.get(talk), prompts.question()
                asked[talk] = pool.submit(_ask_after, before, contender, talk, question)
                answers.append(asked[talk])
    trial = Trial(tuple(answer.result() for answer in answers), time.perf_counter() - began)
    yield name, trial


def _ask_after(
    before: Future[Answered] | None, contender: Contender, talk: Talk, question: str
) -> Answered:
    if before is not None:
        before.result()
    return talk.ask(contender, question)


SCENARIOS: Mapping[str, Scenario] = {
    "alone": alone,
    "chat": chat,
    "concurrent": concurrent,
    "crowd": crowd,
    "restart": restart,
    "conversations": conversations,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the runs. Of the times to the first token of a run's requests: the median, the
    longest, and each in the order of the requests. `first_token_ratio` is mlx-lm's median over
    this one's. `speed_ratios` are mlx-lm's seconds over this one's in each run, where one was
    asked right after the other, and `speed_ratio` is their median: above 1 is better than mlx-lm.
    Tokens are those of one run."""

    scenario: str
    server: str
    seconds: float
    tokens_per_second: float
    first_token_seconds: float
    longest_first_token_seconds: float
    first_token_seconds_each: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_ratio: float
    speed_ratio: float
    speed_ratios: tuple[float, ...]


def summary(scenario: str, trials: Mapping[str, list[Trial]]) -> list[Row]:
    """`trials`: of each server, mlx-lm's first, one for each run."""
    rows: list[Row] = []
    first_of_all = next(iter(trials.values()))
    for server, runs in trials.items():
        ratios = [one.seconds / run.seconds for one, run in zip(first_of_all, runs, strict=True)]
        firsts = [[answer.first_token_seconds for answer in run.answers] for run in runs]
        first = median(median(times) for times in firsts)
        answers = runs[-1].answers
        generated = [sum(answer.completion_tokens for answer in run.answers) for run in runs]
        rows.append(
            Row(
                scenario,
                server,
                median(run.seconds for run in runs),
                median(tokens / run.seconds for tokens, run in zip(generated, runs, strict=True)),
                first,
                median(max(times) for times in firsts),
                tuple(median(times) for times in zip(*firsts, strict=True)),
                sum(answer.prompt_tokens for answer in answers),
                sum(answer.cached_tokens for answer in answers),
                generated[-1],
                rows[0].first_token_seconds / first if rows else 1.0,
                median(ratios),
                tuple(ratios),
            )
        )
    return rows


def measure(
    servers: Sequence[Contender], model: Path, size: Size, runs: int, names: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        found: dict[str, dict[str, list[Trial]]] = {}
        for run in range(runs):
            progress(f"{name}, run {run + 1} of {runs}")
            # By turns first: whoever comes second finds the machine as the other one left it.
            turns = servers if run % 2 == 0 else servers[::-1]
            asked = [
                SCENARIOS[name](server, Prompts(model, size, (run, *name.encode())))
                for server in turns
            ]
            # One after the other at each step, for the machine's speed drifts within minutes.
            for step in zip(*asked, strict=True):
                for server, (scenario, trial) in zip(turns, step, strict=True):
                    trials = found.setdefault(scenario, {server.name: [] for server in servers})
                    trials[server.name].append(trial)
        for scenario, trials in found.items():
            rows += summary(scenario, trials)
    return rows


def unpacked(name: str, folder: Path) -> Path:
    """A folder of the weights as our engine computes with them: on a CPU it makes float32 of
    quantized ones, and mlx-lm would not."""
    loaded = load(ModelSpec(name), backend.describe())
    if not loaded.dequantized:
        return loaded.folder
    shutil.copytree(loaded.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    plain = {key: value for key, value in loaded.config.items() if "quantization" not in key}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


COLUMNS: Columns = {
    "": lambda row: row.scenario,
    "server": lambda row: row.server,
    "first token": lambda row: seconds(row.first_token_seconds),
    "longest": lambda row: seconds(row.longest_first_token_seconds),
    "total": lambda row: seconds(row.seconds),
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "prompt": lambda row: str(row.prompt_tokens),
    "cached": lambda row: str(row.cached_tokens),
    "reply": lambda row: str(row.completion_tokens),
    "of mlx-lm's": lambda row: f"{row.first_token_ratio:.2f}",
    "speed": lambda row: f"{row.speed_ratio:.2f}",
    "of single runs": lambda row: f"{min(row.speed_ratios):.2f} to {max(row.speed_ratios):.2f}",
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--step", type=int, default=256, help="prefill step of both (256)")
    parser.add_argument("--codec", default="q8", help="of the cachestore (q8)")
    parser.add_argument("--kv-bits", type=int, help="of live caches, in both (full precision)")
    parser.add_argument(
        "--prompt-tokens", type=int, help="of chats that have nothing in common (200)"
    )
    parser.add_argument(
        "--at-once", type=int, nargs="+", help="how many such chats at once, in turn (1 4 8)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each, of which the median (3)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options = parser.parse_args()
    with short_directory() as directory:
        if options.small:
            model, size, runs = save_tiny_model(directory / "model"), SMALL, 1
        else:
            model, size, runs = unpacked(options.model, directory / "model"), FULL, options.runs
        if options.prompt_tokens is not None:
            size = replace(size, chat_prompt_tokens=options.prompt_tokens)
        if options.at_once is not None:
            size = replace(size, concurrent=tuple(options.at_once))
        mx.clear_cache()
        with contenders(model, options.step, options.codec, directory, options.kv_bits) as servers:
            rows = measure(servers, model, size, runs, options.only)
    publish(options, f"Prefill step {options.step}, medians of {runs}", COLUMNS, rows)


if __name__ == "__main__":
    main()
