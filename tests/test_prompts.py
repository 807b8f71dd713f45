"""Prompts in every form they come in, and the batch that both sides are given."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable

from bisect_tool.prompts import Batch, make_batch, read_prompts

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
MESSAGES = [{"role": "user", "content": "hello"}]


class Letters:
    """A tokenizer: one id a letter."""

    def ids(self, prompt: Any) -> list[int]:
        return [ord(letter) - ord("a") for letter in (prompt if isinstance(prompt, str) else prompt[0]["content"])]


def no_tokenizer() -> Letters:
    raise UsageError("the directory has no tokenizer, and a prompt is text")


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def jsonl(path: Path, *records: Any) -> str:
    return written(path / "prompts.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path / "prompts.txt", "one two\n\n  \nthree\n")) == ["one two", "three"]


@pytest.mark.parametrize(("key", "value"), [("prompt", "one"), ("text", "one"), ("messages", MESSAGES), ("input_ids", [3, 1, 2])])
def test_jsonl_is_read_by_each_key(key: str, value: Any, tmp_path: Path) -> None:
    assert read_prompts(jsonl(tmp_path, {"id": 7, key: value}, {key: value})) == [value, value]


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    record = {"prompt": "one\u2028two"}
    assert read_prompts(written(tmp_path / "prompts.jsonl", json.dumps(record, ensure_ascii=False))) == ["one\u2028two"]


def test_ids_win_over_text_that_they_were_made_of(tmp_path: Path) -> None:
    assert read_prompts(jsonl(tmp_path, {"prompt": "one", "input_ids": [1, 2]})) == [[1, 2]]


def test_another_field_is_read_where_it_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"question": "why", "prompt": "not this"})
    assert read_prompts(path, "question") == ["why"]
    with pytest.raises(UsageError, match=r"line 1 has none of answer; it has question, prompt; name another with --input-key"):
        read_prompts(path, "answer")


@pytest.mark.parametrize(
    ("text", "prompts"),
    [("one\ntwo\n", ["one", "two"]), ('{"input_ids": [1, 2]}\n{"prompt": "x"}\n', [[1, 2], "x"])],
    ids=["text", "jsonl"],
)
def test_a_dash_is_standard_input(text: str, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_prompts("-") == prompts


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n"])
def test_an_empty_file_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(written(tmp_path / "prompts.txt", text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such prompts file"):
        read_prompts(str(tmp_path / "absent.jsonl"))
    (tmp_path / "prompts.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="is no text"):
        read_prompts(str(tmp_path / "prompts.txt"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{prompt: one}", "line 2 is not JSON"),
        ('{"question": "why"}', "line 2 has none of input_ids, prompt, text, messages; it has question"),
        ("[1, 2]", "line 2 has none of"),
        ('{"input_ids": []}', "line 2: input_ids is empty"),
        ('{"input_ids": [1, "2"]}', 'line 2: input_ids is no list of token ids (whole numbers): [1, "2"]'),
        ('{"input_ids": [true]}', "line 2: input_ids is no list of token ids (whole numbers): [true]"),
        ('{"input_ids": [1.0]}', "line 2: input_ids is no list of token ids (whole numbers): [1.0]"),
        ('{"input_ids": "3"}', 'line 2: input_ids is no list of token ids (whole numbers): "3"; text goes under prompt'),
        ('{"input_ids": [{"role": "user", "content": "3"}]}', "line 2: input_ids is no list of token ids"),
        ('{"prompt": [1, "2"]}', "line 2: prompt is neither text, messages nor token ids"),
        ('{"prompt": 3}', "line 2: prompt is neither"),
        ('{"prompt": null}', "line 2 has none of"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read_prompts(written(tmp_path / "prompts.jsonl", f'{{"prompt": "fine"}}\n{line}\n'))


def test_text_and_ids_make_one_batch() -> None:
    batch = make_batch(["abc", [7, 8], "z"], Letters, vocabulary=26, positions=None)
    assert batch.rows == ((0, 1, 2), (7, 8), (25,))
    assert make_batch([MESSAGES], Letters, vocabulary=26, positions=None).rows == ((7, 4, 11, 11, 14),)


def test_no_tokenizer_is_asked_for_where_every_prompt_is_ids() -> None:
    assert make_batch([[1, 2], [3]], no_tokenizer, vocabulary=4, positions=2).tokens == 3
    with pytest.raises(UsageError, match="has no tokenizer"):
        make_batch([[1, 2], "text"], no_tokenizer, vocabulary=4, positions=2)


@pytest.mark.parametrize("ids", [[0, 26], [-1, 3], [25, 1000, 2]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    worst = next(token for token in ids if not 0 <= token < 26)
    with pytest.raises(UsageError, match=rf"prompt 1 has token id {worst}; the vocabulary has 26 \(0 to 25\)"):
        make_batch([[0, 25], ids], no_tokenizer, vocabulary=26, positions=None)


def test_a_prompt_longer_than_the_models_positions_is_refused() -> None:
    assert make_batch([[1, 2, 3]], no_tokenizer, vocabulary=9, positions=3).lengths == (3,)
    with pytest.raises(UsageError, match="prompt 0 has 4 tokens, the model 3 positions"):
        make_batch([[1, 2, 3, 4]], no_tokenizer, vocabulary=9, positions=3)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="prompt 0 has no tokens"):
        make_batch([""], Letters, vocabulary=9, positions=3)


def test_ids_are_padded_to_the_right_and_repeated() -> None:
    batch = Batch(((1, 2, 3), (4,)), pad=9)
    assert batch.ids().tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.ids(rows=3, length=4).tolist() == [[1, 2, 3, 9], [4, 9, 9, 9], [1, 2, 3, 9]]
    assert batch.mask().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.mask(4).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_padding_on_the_left_stands_before_every_row_and_is_loud() -> None:
    batch = Batch(((1, 2, 3), (4,)), pad=9).padded_left()
    assert batch.ids().tolist() == [[9] * 13 + [1, 2, 3], [9] * 15 + [4]]
    assert batch.mask(rows=3).tolist() == [[0] * 13 + [1, 1, 1], [0] * 15 + [1], [0] * 13 + [1, 1, 1]]
    padded = batch.unpack(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 2, 16)
    assert padded[:, 0].tolist() == [[1.0], [4.0]]
    assert batch.pack(padded).flatten().tolist() == [1, 2, 3, 4]
    # a row has the same positions in whatever part it is run
    assert [part.ids().shape[1] for _, part in batch.parts(1)] == [16, 16]
    assert [len(part.rows) for _, part in batch.parts(32)] == [2]
    assert batch.padded_right() == Batch(((1, 2, 3), (4,)), pad=9)
    assert len(Batch((tuple(range(16)),)).padded_left().ids()[0]) == 32


@repeatable
@given(ROWS, st.integers(0, 3), st.integers(0, 3))
def test_what_is_packed_unpacks_to_the_same(rows: tuple[tuple[int, ...], ...], more_rows: int, more_length: int) -> None:
    batch = Batch(rows, pad=100)
    packed = torch.cat([torch.tensor(row) for row in rows])[:, None].expand(-1, 2)
    padded = batch.unpack(packed, len(rows) + more_rows, max(batch.lengths) + more_length)
    assert torch.equal(batch.pack(padded), packed)
    assert torch.equal(batch.pack(batch.ids(len(rows) + more_rows, max(batch.lengths) + more_length)), packed[:, 0])
    for i in range(more_rows):
        assert torch.equal(padded[len(rows) + i], padded[i % len(rows)])  # copies are prompts again, in turn
    outside = batch.mask(padded.shape[1]) == 0
    assert not padded[: len(rows)][outside].any()


@repeatable
@given(ROWS)
def test_every_packed_token_knows_where_it_stood(rows: tuple[tuple[int, ...], ...]) -> None:
    batch = Batch(rows)
    assert [rows[prompt][position] for prompt, position in map(batch.where, range(batch.tokens))] == [
        token for row in rows for token in row
    ]
    with pytest.raises(IndexError):
        batch.where(batch.tokens)


def test_the_digest_tells_batches_apart() -> None:
    assert Batch(((1, 2), (3,))).digest == Batch(((1, 2), (3,))).digest
    assert len({Batch(rows).digest for rows in (((1, 2), (3,)), ((1,), (2, 3)), ((1, 2, 3),), ((3,), (1, 2)))}) == 4


@given(ROWS, st.integers(1, 20))
@repeatable
def test_parts_are_the_batch_in_pieces_of_bounded_size(rows: tuple[tuple[int, ...], ...], most: int) -> None:
    parts = Batch(rows).parts(most)
    assert tuple(row for _, part in parts for row in part.rows) == rows
    assert all(len(part.rows) == 1 or part.ids().numel() <= most for _, part in parts)
    assert [start for start, _ in parts] == [sum(part.tokens for _, part in parts[:i]) for i in range(len(parts))]
