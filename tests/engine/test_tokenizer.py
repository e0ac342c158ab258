import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import utils
from tokenizers import Tokenizer, processors

from engine.tokenizer import Detokenizer, PromptEncoder
from tests.support.models import (
    SPECIAL_TOKENS,
    VOCABULARY_TOKENS,
    llama_config,
    save_tiny_tokenizer,
)


def load(folder: Path, **settings: Any) -> Any:
    save_tiny_tokenizer(folder, **settings)
    return utils.load_tokenizer(folder, eos_token_ids=llama_config()["eos_token_id"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, VOCABULARY_TOKENS)


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_a_chat_is_rendered_with_the_generation_prompt(
    encoder: PromptEncoder, tokenizer: Any
) -> None:
    ids = encoder.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_bos_in_the_text_is_not_doubled(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    plain = Tokenizer.from_file(file)
    bos = SPECIAL_TOKENS[0]
    plain.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 256)]
    )
    plain.save(file)
    encoder = PromptEncoder(utils.load_tokenizer(tmp_path), VOCABULARY_TOKENS)
    assert encoder.encode_text("a").count(256) == 1
    assert encoder.encode_text("a") == encoder.encode_text(f"{bos}a")


def test_wrong_prompts_are_refused_by_field(encoder: PromptEncoder) -> None:
    with pytest.raises(ValueError, match=r"^prompt\.text: empty"):
        encoder.encode_text("")
    with pytest.raises(ValueError, match=r"^prompt\.chat\.messages: empty"):
        encoder.encode_chat([])
    with pytest.raises(ValueError, match=r"^prompt\.chat\.messages\[1\]\.role: empty"):
        encoder.encode_chat([{"role": "user", "content": "a"}, {"role": "", "content": "b"}])
    with pytest.raises(ValueError, match=r"^prompt\.chat\.messages: .*unknown role pirate"):
        encoder.encode_chat([{"role": "pirate", "content": "a"}])
    with pytest.raises(ValueError, match=r"^prompt\.token_ids\.ids: empty"):
        encoder.encode_ids([])
    for wrong in (VOCABULARY_TOKENS, -1, 2**32 - 1):
        with pytest.raises(ValueError, match=rf"^prompt\.token_ids\.ids: {wrong} is outside"):
            encoder.encode_ids([1, wrong, 2])
    assert encoder.encode_ids([0, VOCABULARY_TOKENS - 1]) == [0, VOCABULARY_TOKENS - 1]


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    encoder = PromptEncoder(load(tmp_path, chat_template=None), VOCABULARY_TOKENS)
    with pytest.raises(ValueError, match=r"^prompt\.chat: the model has no chat template"):
        encoder.encode_chat([{"role": "user", "content": "a"}])


def test_tokens_beyond_the_embedding_are_refused(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, 256)
    with pytest.raises(ValueError, match=r"^prompt\.text: 258 is outside the vocabulary of 256"):
        encoder.encode_text("a<|im_end|>")


def test_threads_may_encode_together(encoder: PromptEncoder) -> None:
    texts = [f"text {n} é " * 200 for n in range(8)]
    alone = [encoder.encode_text(text) for text in texts]
    wrong: list[int] = []
    start = threading.Barrier(len(texts))

    def encode(index: int) -> None:
        start.wait()
        for _ in range(20):
            if encoder.encode_text(texts[index]) != alone[index]:
                wrong.append(index)

    threads = [threading.Thread(target=encode, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(st.text())
def test_pieces_of_text_join_and_never_break_a_character(tokenizer: Any, text: str) -> None:
    # A replacement character of the text itself is the only one that may come.
    parts = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.lists(st.integers(0, 255)))
def test_pieces_join_to_the_decoded_tokens_whatever_the_bytes(
    tokenizer: Any, tokens: list[int]
) -> None:
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_an_unfinished_character_comes_with_the_flush(tokenizer: Any) -> None:
    tokens = tokenizer.encode("a😀", add_special_tokens=False)
    assert pieces(tokenizer, tokens) == ["a", "", "", "", "😀", ""]
    assert pieces(tokenizer, tokens[:-1]) == ["a", "", "", "", "\ufffd"]


def test_the_space_that_begins_a_reply_is_kept(tokenizer: Any) -> None:
    assert pieces(tokenizer, tokenizer.encode(" a", add_special_tokens=False)) == [" ", "a", ""]
