"""Where other chats part from one in its tokens, whatever its template does."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoints import Boundaries
from engine.tokenizer import PromptEncoder
from tests.support.models import CHAT_TEMPLATE, VOCABULARY_TOKENS, save_tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi!"}
MORE = {"role": "user", "content": "And now?"}

# The system message is a part of the user's first turn, and none by itself.
FOLDED = (
    "{% if messages[0].role == 'system' %}"
    "{% if messages | length == 1 %}{{ raise_exception('a user must speak') }}{% endif %}"
    "{% set first = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('users and assistants take turns') }}{% endif %}"
    "<|im_start|>{{ turn.role }}\n{{ first if loop.first }}{{ turn.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends what is not to be continued.
ENDED = CHAT_TEMPLATE + "{% if not add_generation_prompt %}<|endoftext|> The end.{% endif %}"
# Marks the latest message.
MARKED = CHAT_TEMPLATE.replace(
    "{{ message.content }}", "{{ '(latest) ' if loop.last }}{{ message.content }}"
)
THINKING = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
WITHOUT_PROMPT = CHAT_TEMPLATE.partition("{% if add_generation_prompt %}")[0]


def encoder_of(folder: Path, template: str) -> PromptEncoder:
    save_tiny_tokenizer(folder, template)
    return PromptEncoder(utils.load_tokenizer(folder), VOCABULARY_TOKENS)


def cut(encoder: PromptEncoder, *messages: dict[str, str]) -> tuple[list[str], str]:
    """The text up to each parting, and up to the conversation's start."""
    tokens = encoder.encode_chat(messages)
    found = encoder.boundaries(messages, tokens)
    *partings, start = (
        str(encoder._tokenizer.decode(tokens[:end]))
        for end in (*found.partings, found.conversation_start)
    )
    return partings, start


def chatml(*messages: dict[str, str]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def prompt(*messages: dict[str, str]) -> str:
    return f"{chatml(*messages)}<|im_start|>assistant\n"


def test_a_chat_with_a_system_message(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, CHAT_TEMPLATE)
    # All conversations with this system message have the user's header in common too.
    system = chatml(SYSTEM) + "<|im_start|>user\n"
    first_turn = prompt(SYSTEM, USER)
    # The next turn has the assistant's header in common.
    assert cut(encoder, SYSTEM, USER) == ([system, first_turn], first_turn)
    later = [SYSTEM, USER, ASSISTANT, MORE]
    assert cut(encoder, *later) == ([system, prompt(*later)], first_turn)


def test_a_chat_without_a_system_message(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, CHAT_TEMPLATE)
    first_turn = prompt(USER)
    assert cut(encoder, USER) == ([first_turn], first_turn)
    later = [USER, ASSISTANT, MORE]
    assert cut(encoder, *later) == ([first_turn, prompt(*later)], first_turn)


def test_a_chat_without_a_user_has_no_start(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, CHAT_TEMPLATE)
    assert cut(encoder, SYSTEM) == ([prompt(SYSTEM)], "")


def test_a_system_message_that_is_folded_into_the_users_turn(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, FOLDED)
    system = "<|im_start|>user\nBe brief.\n\n"
    turn = f"{system}Hello<|im_end|>\n<|im_start|>assistant\n"
    assert cut(encoder, SYSTEM, USER) == ([system, turn], turn)
    # What is trimmed, and a text like the one that is tried instead, change nothing.
    assert cut(encoder, SYSTEM, {**USER, "content": " \n 0"})[0][0] == system
    assert cut(encoder, SYSTEM, {**USER, "content": "10"})[0][0] == system


def test_a_template_that_ends_what_is_not_to_be_continued(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, ENDED)
    first_turn = prompt(USER)
    assert cut(encoder, USER) == ([first_turn], first_turn)


def test_a_template_that_renders_the_last_message_otherwise(tmp_path: Path) -> None:
    """The next turn parts where that message begins."""
    encoder = encoder_of(tmp_path, MARKED)
    header = "<|im_start|>user\n"
    system = chatml(SYSTEM) + header
    assert cut(encoder, SYSTEM, USER) == ([system, f"{system}(latest) "], system)
    later = chatml(SYSTEM, USER, ASSISTANT) + header
    assert cut(encoder, SYSTEM, USER, ASSISTANT, MORE) == ([system, later], system)


def test_a_template_that_leaves_thoughts_out_of_what_was_said_before(tmp_path: Path) -> None:
    """Its generation prompt begins with a thought, which the next turn does not have."""
    encoder = encoder_of(tmp_path, THINKING)
    first_turn = prompt(USER)
    assert cut(encoder, USER) == ([first_turn], first_turn)
    tokens = encoder.encode_chat([USER])
    assert encoder._tokenizer.decode(tokens) == first_turn + "<think>\n"
    later = [USER, ASSISTANT, MORE]
    assert cut(encoder, *later) == ([first_turn, prompt(*later)], first_turn)


def test_a_template_without_a_generation_prompt_ends_where_the_prompt_does(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, WITHOUT_PROMPT)
    tokens = encoder.encode_chat([USER])
    assert encoder.boundaries([USER], tokens) == Boundaries((len(tokens),), len(tokens))


def test_a_chat_is_rendered_no_more_often_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(tmp_path, CHAT_TEMPLATE)
    rendered: list[int] = []
    render = encoder._render

    def counted(messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
        rendered.append(len(messages))
        return render(messages, generation_prompt)

    monkeypatch.setattr(encoder, "_render", counted)
    later = [SYSTEM, USER, ASSISTANT, MORE]
    for messages, lengths in (
        ([USER], [1, 3]),
        ([SYSTEM, USER], [2, 4, 2]),
        # The whole of it once beside the prompt itself.
        (later, [4, 6, 2, 2]),
    ):
        cut(encoder, *messages)
        assert rendered == lengths
        rendered.clear()


def test_a_token_that_reaches_over_an_end_is_behind_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n' }}assistant:\n{% endif %}"
    )
    save_tiny_tokenizer(tmp_path, template)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"
    vocabulary = {c: i for i, c in enumerate([*alphabet, newline * 2])}
    merging = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merging.decoder = decoders.ByteLevel()
    merging.save(str(tmp_path / "tokenizer.json"))
    encoder = PromptEncoder(utils.load_tokenizer(tmp_path), VOCABULARY_TOKENS)
    assert cut(encoder, USER) == (["user:\nHello"], "user:\nHello")


TEXTS = st.text("ab01 \n<", max_size=5)
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS}),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> list[PromptEncoder]:
    templates = [CHAT_TEMPLATE, FOLDED, ENDED, MARKED, THINKING, WITHOUT_PROMPT]
    return [encoder_of(tmp_path_factory.mktemp("t"), template) for template in templates]


@given(messages=MESSAGES)
def test_ends_lie_within_the_prompt_and_no_chat_fails_for_them(
    encoders: list[PromptEncoder], messages: list[dict[str, str]]
) -> None:
    for encoder in encoders:
        try:
            tokens = encoder.encode_chat(messages)
        except ValueError:
            continue
        found = encoder.boundaries(messages, tokens)
        assert all(0 < parting <= len(tokens) for parting in found.partings)
        assert 0 <= found.conversation_start <= len(tokens)
