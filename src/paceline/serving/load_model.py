"""A model and its tokenizer for generation: from a run, a checkpoint, an export or a Hugging Face folder.

Our GPT needs no transformers and none of the text of its training. Files are memory-mapped, and their hashes
are compared as in training. Invariant: no hub is contacted, nothing is unpickled, and no code of a folder
runs; only a run of a task of your own runs its build function, as `paceline evaluate` does.

Refused: a tokenizer with another vocabulary than that of the weights, one with more tokens than the output
layer has rows, and weights that are not finite. The memory of a served model is known before it is loaded:
keys and values of slots are allocated once and never grow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.checkpoint.checkpoint_reader import map_checkpoint
from paceline.checkpoint.model_weights import WhichWeights, find_checkpoint, model_weights_of
from paceline.checkpoint.pretrained import (
    CHECKSUMS_FILE,
    VOCABULARY_KEY,
    find_vocabulary,
    open_weight_files,
    require_same_tensors,
    require_same_vocabulary,
)
from paceline.checkpoint.safetensors_file import decode_tensors, parse_metadata
from paceline.checkpoint.storage import MappedFile
from paceline.data.tokenizer import (
    TOKENIZER_FILE,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    import_tokenizers,
    read_end_of_text,
    read_tokenizer_json,
    tokenizer_errors,
    tokenizer_paths,
    vocabulary_of,
)
from paceline.errors import CheckpointError, DataError, MissingExtraError, TaskError, format_count
from paceline.models.gpt import GPT
from paceline.models.initialize import replace_parameters
from paceline.observe.process_info import cache_folder
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.tables import ServeRecipe
from paceline.recipe.toml_text import parse_toml
from paceline.report.number_format import format_bytes
from paceline.report.run_files import RECIPE
from paceline.serving.engine import MAX_CHUNKS_AT_ONCE
from paceline.serving.kv_cache import SlotSettings
from paceline.serving.slot_forward import model_call
from paceline.serving.text_stream import ServingTokenizer
from paceline.session.arguments import resolve_run
from paceline.session.checkpointing import checkpoint_files
from paceline.session.hugging_face_export import find_model, find_tokenizer
from paceline.session.run_folder import run_folder_of
from paceline.session.saved_run import task_for_inference
from paceline.state.slot import first_tied_names
from paceline.task import Task
from paceline.tasks.byte_gpt import ByteGptOptions, build_model
from paceline.tasks.task_options import read_options
from paceline.tasks.task_registry import load_task

_CONFIG = "config.json"
_END_TOKENS = ("<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>")


@dataclass(frozen=True)
class ServedModel:
    """A model that can generate, in evaluation mode.

    Args:
        model: maps tokens, int64 [B, T], to logits [B, T, V], or to an output of transformers with `logits`.
        tokenizer: its tokenizer.
        context: the longest sequence that the model takes, in tokens.
        vocab_size: rows of the output layer.
        name: as `/v1/models` has it.
        source: where the weights were found.
        chat_template: of the folder; None: there is none.
        marker_texts: texts of the special tokens that a chat template may name, such as `bos_token`.
        settings: of the recipe of the weights; None: they have no recipe.
        task: of a run of your own, which knows how ranks split the model; None: there is none, or its model
            is only a part of another.
    """

    model: nn.Module
    tokenizer: ServingTokenizer
    context: int
    vocab_size: int
    name: str
    source: str
    chat_template: str | None
    marker_texts: Mapping[str, str]
    settings: ServeRecipe | None
    task: Task | None = None


@dataclass(frozen=True)
class _Parts:
    """A source of a model: its weights, its tokenizer, and the vocabulary of the weights."""

    model: nn.Module
    tokenizer: ServingTokenizer
    vocabulary: str
    source: str
    folder: Path | None  # with a chat template, perhaps
    settings: ServeRecipe | None = None
    task: Task | None = None


def load_served_model(
    place: str | os.PathLike[str],
    *,
    task: str | None = None,
    weights: WhichWeights | None = None,
    tokenizer: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> ServedModel:
    """Load a model and its tokenizer.

    Args:
        place: a run folder, a checkpoint in it, a file of `paceline export`, or a Hugging Face folder.
        task: in place of that of the recipe, "file.py:function".
        weights: of a run that keeps an average of them: "last" or "average"; None: the average.
        tokenizer: a `tokenizer.json`, or a folder with one, in place of the model's.
        warn: receives which checkpoints cannot be used, and what was not verified.
    Raises:
        CheckpointError: weights are missing, damaged, do not fit or are not finite, or the tokenizer belongs
            to others.
        DataError: the tokenizer cannot be used, or has more tokens than the output layer has rows.
        TaskError: no language model was found.
        MissingExtraError: transformers or tokenizers is needed and not installed.
    """
    path = Path(place)
    if path.is_file():
        parts = _load_export(path, task, tokenizer)
    elif (path / _CONFIG).is_file() and not (path / RECIPE).is_file():
        parts = _load_transformers(path, tokenizer, warn)
    else:
        parts = _load_run(path, task, weights, tokenizer, warn)
    require_same_vocabulary(parts.tokenizer.vocabulary, parts.vocabulary, parts.source)
    parts.tokenizer.require_streamable(parts.source)
    model = parts.model if isinstance(parts.model, GPT) else find_model(parts.model)[1]
    _require_finite(model, parts.source)
    context, vocab_size = model_limits(model)
    if parts.tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {parts.tokenizer.vocab_size} tokens, and the output layer {vocab_size} rows",
            where=parts.source,
            next_step="use the tokenizer that the model was trained with",
        )
    template, markers = _read_chat_template(parts.folder)
    return ServedModel(
        model=model.eval(),
        tokenizer=parts.tokenizer,
        context=context,
        vocab_size=vocab_size,
        name=path.resolve().name,
        source=parts.source,
        chat_template=template,
        marker_texts=markers,
        settings=parts.settings,
        task=parts.task if model is parts.model else None,
    )


def model_limits(model: Any) -> tuple[int, int]:
    """Return the context of a language model and the rows of its output layer.

    Raises:
        TaskError: it is neither our GPT nor a decoder of transformers.
    """
    if isinstance(model, GPT):
        return model.config.context, model.config.vocab
    model = find_model(model)[1]
    output = model.get_output_embeddings()
    context = getattr(model.config, "max_position_embeddings", None)
    if output is None or context is None:
        raise TaskError(
            f"{type(model).__name__} is no language model with an output layer and a context",
            next_step="use a decoder of transformers, such as Llama, GPT-2 or Qwen, or a run of byte-gpt",
        )
    return int(context), int(output.weight.shape[0])


def _require_finite(model: nn.Module, source: str) -> None:
    """Refuse parameters with values that are not finite.

    Raises:
        CheckpointError: names the first tensor.
    """
    for name, p in model.named_parameters():
        finite = torch.isfinite(p)
        if not bool(finite.all()):
            count = p.numel() - int(finite.sum())
            raise CheckpointError(
                f"{format_count(count, 'value')} of {p.numel()} in {name} are NaN or infinite",
                where=source,
                next_step="use an earlier checkpoint of the run: RUN/checkpoints/NAME",
            )


@torch.no_grad()
def _fill(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Put tensors in place of the parameters of a model, without a copy where they have one dtype."""
    named = model.state_dict()
    require_same_tensors(named, {name: list(value.shape) for name, value in weights.items()}, source)
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    if len(dtypes) > 1:
        weights = {name: v.float() if v.is_floating_point() else v for name, v in weights.items()}
    first = first_tied_names(named)
    values = {first[name]: value for name, value in weights.items()}
    parameters = dict(model.named_parameters())
    replace_parameters(
        model, {id(p): nn.Parameter(values[name], requires_grad=False) for name, p in parameters.items()}
    )
    for name, buffer in named.items():
        if name not in parameters and first[name] == name:
            buffer.copy_(values[name])


def _load_run(
    place: Path,
    task: str | None,
    which: WhichWeights | None,
    tokenizer: str | None,
    warn: Callable[[str], None],
) -> _Parts:
    if not place.exists() and not (run_folder_of(place) / RECIPE).is_file():  # "best" is no folder
        raise CheckpointError(f"'{place}' does not exist", next_step="name a run, an export or a folder")
    try:
        path = resolve_run(place) or place
        folder = run_folder_of(path)
    except DataError:  # it has no runs in it, either
        path = folder = place
    if not (folder / RECIPE).is_file():
        raise CheckpointError(
            f"'{place}' has neither {RECIPE} nor {_CONFIG}",
            next_step="name a run folder, a file of `paceline export`, or a Hugging Face folder",
        )
    recipe = load_recipe(folder / RECIPE)
    name = None if path.resolve() == folder.resolve() else path.name
    checkpoint = find_checkpoint(checkpoint_files(recipe, folder), warn, name, map_checkpoint)
    source = f"{folder}, {checkpoint.name}"
    if task is None and recipe.task == "byte-gpt":
        built = None
        model, own = _build_byte_gpt(recipe.options, folder, tokenizer)
        chat = recipe.options.get("tokenizer")
    else:
        built = task_for_inference(recipe, task, folder)
        model, place_of_tokenizer = built.model, tokenizer
        if place_of_tokenizer is None:
            inner = None if isinstance(model, GPT) else find_model(model)[1]
            place_of_tokenizer, _ = find_tokenizer(recipe.options, recipe.init_from, inner)
        own = (
            ServingTokenizer.of_bytes() if place_of_tokenizer is None else read_tokenizer(place_of_tokenizer)
        )
        chat = place_of_tokenizer
    vocabulary = checkpoint.manifest.origin.versions.get(VOCABULARY_KEY, "")
    require_same_vocabulary(own.vocabulary, vocabulary, source)  # its size is that of the model
    _fill(model, model_weights_of(checkpoint, which), source)
    place_of_template = Path(chat) if isinstance(chat, str) else None
    return _Parts(model, own, vocabulary, source, place_of_template, recipe.serve, built)


def _build_byte_gpt(
    options: Mapping[str, Any], folder: Path, tokenizer: str | None
) -> tuple[nn.Module, ServingTokenizer]:
    """Build the model of the task `byte-gpt`; its tokenizer is relative to the folder or the present one."""
    chosen = read_options(ByteGptOptions, dict(options))
    if tokenizer is not None:
        chosen = chosen.replace(tokenizer=str(Path(tokenizer).resolve()))
    places = [base for base in (folder, Path.cwd()) if (base / (chosen.tokenizer or "")).exists()]
    model, own = build_model(chosen, places[0] if places else folder)
    return model, _serving_tokenizer(own)


def _serving_tokenizer(own: Tokenizer) -> ServingTokenizer:
    """Return the tokenizer of a training, which adds no markers to a text."""
    if isinstance(own, ByteTokenizer):
        return ServingTokenizer.of_bytes()
    assert isinstance(own, BpeTokenizer)
    return ServingTokenizer(
        own.library, own.vocab_size, own.vocabulary, frozenset([own.separator]), adds_markers=False
    )


def _load_export(path: Path, task: str | None, tokenizer: str | None) -> _Parts:
    """Load a file that `paceline export` has written; its header has the recipe."""
    try:
        with ExitStack() as stack:
            (file,) = (stack.enter_context(closing(file)) for file in open_weight_files(str(path)))
            file.verify()
            vocabulary = file.vocabulary
        mapped = MappedFile(path)
        length = int.from_bytes(mapped.data[:8], "little")
        texts = parse_metadata(mapped.data[8 : 8 + length])
        weights = decode_tensors(mapped.data)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the weights: {error}", where=str(path), next_step="export the run again"
        ) from error
    if "recipe" not in texts:
        raise CheckpointError(
            "this file does not say which model it belongs to",
            where=str(path),
            next_step="name a file of `paceline export`, or the Hugging Face folder that the file lies in",
        )
    recipe = parse_toml(texts["recipe"])
    options = recipe.get("options", {})
    beside = path.with_name(TOKENIZER_FILE)
    if task is None and recipe.get("task") == "byte-gpt":
        if tokenizer is None and options.get("tokenizer") and beside.is_file():
            tokenizer = str(beside)
        model, own = _build_byte_gpt(options, path.parent, tokenizer)
    elif task is None:
        raise TaskError(
            f"the export is of the task {recipe.get('task')!r}, whose code is not in the file",
            where=str(path),
            next_step="pass --task file.py:function, or name the run folder",
        )
    else:
        model = load_task(task, options, int(recipe.get("seed", 0)), Path.cwd(), cache_folder()).model
        has_tokenizer = tokenizer is not None or beside.is_file()
        own = read_tokenizer(tokenizer or str(beside)) if has_tokenizer else ServingTokenizer.of_bytes()
    require_same_vocabulary(own.vocabulary, vocabulary, str(path))
    _fill(model, weights, str(path))
    settings = ServeRecipe(**recipe.get("serve", {}))
    return _Parts(model, own, vocabulary, str(path), path.parent, settings)


def _load_transformers(path: Path, tokenizer: str | None, warn: Callable[[str], None]) -> _Parts:
    """Load a folder of Hugging Face's `save_pretrained`, or a downloaded one."""
    library = _import_transformers()
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(closing(file)) for file in open_weight_files(str(path))]
            for file in files:
                file.verify()
            unverified = [file.name for file in files if not file.checksum_source]
            vocabulary = find_vocabulary(str(path), files)
        with _no_progress_bar(library):
            model, report = library.AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype="auto",
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read the model: {str(error)[:500]}",
            where=str(path),
            next_step="use a folder with config.json and safetensors files of a causal language model",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would leave them at random values
        raise CheckpointError(
            f"the files lack {format_count(len(missing), 'tensor')} of {type(model).__name__}, first"
            f" {missing[0]}",
            where=str(path),
            next_step="use the whole folder of a causal language model",
        )
    if unverified:
        warn(
            f"the weights have no checksum ({', '.join(unverified[:3])}), so damage would not be noticed. Run"
            f" `sha256sum *.safetensors > {CHECKSUMS_FILE}` in {path}"
        )
    own = read_tokenizer(tokenizer or str(path))
    return _Parts(model, _with_end_tokens(own, model, str(path), warn), vocabulary, str(path), path)


@contextmanager
def _no_progress_bar(library: Any) -> Iterator[None]:
    """Keep the terminal for the text."""
    logging = library.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "a Hugging Face folder needs transformers, which is not installed",
            next_step="pip install 'paceline[hf]'",
        ) from error
    return transformers


def _with_end_tokens(
    own: ServingTokenizer, model: Any, source: str, warn: Callable[[str], None]
) -> ServingTokenizer:
    """Add the tokens with which the model ends a text, by its configuration."""
    configured = [getattr(config, "eos_token_id", None) for config in (model.config, model.generation_config)]
    ends = {
        token
        for value in configured
        if value is not None
        for token in ([value] if type(value) is int else value)
    }
    assert own.library is not None
    unknown = sorted(token for token in ends if own.library.id_to_token(token) is None)
    if unknown:
        raise CheckpointError(
            f"the tokenizer does not belong to the model: {_CONFIG} ends a text with token {unknown[0]}, and"
            f" the tokenizer, of {own.vocab_size} tokens, has none with this id",
            where=source,
            next_step="use the tokenizer.json of the weights",
        )
    if ends and own.end_tokens and not ends & own.end_tokens:
        warn(
            f"the tokenizer ends a text with {sorted(own.end_tokens)}, the model with {sorted(ends)};"
            " both count"
        )
    return own.with_end_tokens(own.end_tokens | ends)


def read_tokenizer(place: str) -> ServingTokenizer:
    """Read a `tokenizer.json`, or that of a folder; others of transformers' files are converted by it.

    Raises:
        DataError: it is missing or invalid.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = import_tokenizers()
    file, config = tokenizer_paths(place)
    with tokenizer_errors(place):
        if config is not None and not Path(file).is_file():
            text = _convert_tokenizer(place)
        else:
            text = read_tokenizer_json(file)
        end = read_end_of_text(config)
        vocabulary = vocabulary_of(text)
        loaded = library.Tokenizer.from_str(text)
    names = [end] if end else list(_END_TOKENS)
    ends = frozenset(token for name in names if (token := loaded.token_to_id(name)) is not None)
    return ServingTokenizer(loaded, 1 + max(loaded.get_vocab().values(), default=-1), vocabulary, ends)


def _convert_tokenizer(folder: str) -> str:
    """Return the tokenizer of a folder that has vocab.json and merges.txt, or tokenizer.model, instead."""
    tokenizer = _import_transformers().AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return str(tokenizer.backend_tokenizer.to_str())


def _read_chat_template(folder: Path | None) -> tuple[str | None, Mapping[str, str]]:
    """Return the chat template of a folder, and the texts of its special tokens.

    Raises:
        DataError: its tokenizer_config.json is not valid.
    """
    if folder is None or not folder.is_dir():
        return None, {}
    config: Any = {}
    try:
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        file = folder / "chat_template.jinja"
        template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"cannot read the chat template: {error}", where=str(folder), next_step="export the folder again"
        ) from error
    if type(template) is list:  # several by name
        named = (entry for entry in template if type(entry) is dict and entry.get("name") == "default")
        template = next(named, {}).get("template")
    markers = {}
    for name, value in config.items():
        match value:
            case str(text) | {"content": str(text)} if name.endswith("_token"):
                markers[name] = text
    return template if type(template) is str else None, markers


@dataclass(frozen=True)
class SlotMemory:
    """The bytes of a served model.

    Args:
        weights: parameters and buffers; of a mapped file, pages that other processes share.
        cache: keys and values of all slots over the whole context.
        masks: of attention, for all slots and for a chunk.
        logits: of one token of every slot, and of the chunks that run together.
    """

    weights: int
    cache: int
    masks: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())

    def lines(self, settings: SlotSettings) -> list[str]:
        """Return the table for a terminal."""
        slot, most = format_bytes(self.cache // settings.rows), -(-settings.slots // 16) * 16
        more = f"; some processors need up to {most}" if most > settings.rows else ""
        what = {
            "weights": "",
            "cache": f"  {settings.rows} slots of {slot}: keys and values of {settings.context} tokens{more}",
            "masks": "",
            "logits": "",
            "total": "",
        }
        values = {**asdict(self), "total": self.total}
        return [f"{name:<8}{format_bytes(values[name]):>12}{note}" for name, note in what.items()]


class _AttentionShapes(TorchFunctionMode):
    """The sizes of keys and values of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_token = 0
        self.groups = self.itemsize = 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            for part in (key, value):
                self.bytes_per_token += part.shape[-3] * part.shape[-1] * part.element_size()
            self.groups, self.itemsize = query.shape[-3] // key.shape[-3], key.element_size()
        return func(*args, **(kwargs or {}))


def plan_slots(model: nn.Module, settings: SlotSettings) -> SlotMemory:
    """Return the memory of a model and its slots; one chunk runs on tensors without storage.

    Args:
        model: as for `build_engine`; its tensors are moved to the device `meta`.
        settings: of the engine.
    Raises:
        TaskError: the model does not call `scaled_dot_product_attention`, so it has no cache.
    """
    weights = sum(tensor.nbytes for tensor in {id(t): t for t in _tensors(model)}.values())
    tokens = torch.zeros(1, settings.chunk, dtype=torch.int64, device="meta")
    shapes = _AttentionShapes()
    with torch.inference_mode(), shapes:
        logits = model_call(model.to("meta").eval())(tokens, tokens)
    if not shapes.bytes_per_token or logits is None:
        raise TaskError(
            f"{type(model).__name__} does not call scaled_dot_product_attention, so it has no cache",
            next_step="its slots need no memory but that of a forward",
        )
    rows, context, chunk = settings.rows, settings.context, settings.chunk
    return SlotMemory(
        weights=weights,
        cache=rows * context * shapes.bytes_per_token,
        masks=(rows + shapes.groups * chunk) * context * shapes.itemsize,
        logits=(rows + MAX_CHUNKS_AT_ONCE * chunk) * logits.shape[-1] * logits.element_size(),
    )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
