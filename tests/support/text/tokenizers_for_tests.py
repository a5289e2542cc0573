"""Small tokenizers of the two families, as Hugging Face folders."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cluster.text import tokenizer as ours

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEXTS = [
    "def main():\n    print('héllo wörld')\n",
    "the quick brown fox jumps over the lazy dog, again and again",
    "日本語のテキスト 🙂🙃 naïve café",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('only system, user and assistant speak here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_folder(folder: Path) -> Path:
    """GPT-2's kind, with an added token that is not special and one that contains a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é!")])
    return _save(tokenizer, folder)


def byte_fallback_folder(folder: Path) -> Path:
    """Llama 2's kind: metaspace words, byte tokens for text that the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<unk>", *SPECIAL_TOKENS, *byte_tokens],
        limit_alphabet=30,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in TEXTS], trainer)
    # Bytes are ordinary tokens of the vocabulary: only their spelling is special.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return _save(Tokenizer.from_str(json.dumps(state)), folder)


@cache
def small_tokenizer(make: Callable[[Path], Path] = byte_level_folder) -> ours.Tokenizer:
    """The tokenizer of such a folder, made once; the folder is gone."""
    with TemporaryDirectory() as folder:
        return ours.Tokenizer.load(make(Path(folder)))


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    config = {"eos_token_id": [wrapped.convert_tokens_to_ids("<|user|>"), wrapped.eos_token_id]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder
