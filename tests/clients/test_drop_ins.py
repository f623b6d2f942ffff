"""`optimize` on what holds a Hugging Face model: rerankers, sparse encoders, pipelines; models with adapters."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import mostly_nightly
from published_weights import small_bert, stored_bert
from typer.testing import CliRunner

import fxopt
import fxopt_compile
from fxopt.commands.main import build_app
from fxopt.drop_in.clients import with_models_replaced

numpy = pytest.importorskip("numpy")
library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["a few words", "Quite a number of words, and then some more of them.", "one"]
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


SOUNDS = [torch.sin(torch.arange(length) ** 1.3).numpy() for length in (9000, 4000)]
AS_TENSORS = {"sampling_rate": 16_000, "return_tensors": "pt", "padding": True, "return_attention_mask": True}


def pipe(task: str, model: Any, **options: Any) -> Any:
    return transformers.pipeline(task, model=model.eval(), device="cpu", **options)


def reranker(folder: Path) -> Any:
    return library.CrossEncoder(stored_bert(folder, "ForSequenceClassification", num_labels=1), device="cpu")


def sparse(folder: Path) -> Any:
    return library.SparseEncoder(stored_bert(folder, "ForMaskedLM"), device="cpu")


def routed(folder: Path) -> Any:
    modules = library.sentence_transformer.modules
    ways = [modules.Transformer(stored_bert(folder / name)) for name in ("query", "document")]
    router = modules.Router.for_query_document([ways[0]], [ways[1]])
    return library.SentenceTransformer(modules=[router, modules.Pooling(16)], device="cpu")


def of_texts(task: str, head: str, **options: Any) -> Any:
    model, tokenizer = small_bert(head, **options)
    return pipe(task, model, tokenizer=tokenizer)


def of_images(task: str, head: str) -> Any:
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    return pipe(task, getattr(transformers, f"ViT{head}")(config), image_processor=processor)


def of_speech(folder: Path) -> Any:
    (folder / "vocabulary.json").write_text('{"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5, "b": 6}')
    convolutions = {"conv_dim": (8, 8), "conv_stride": (20, 8), "conv_kernel": (40, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**SMALL, **convolutions, **positions, vocab_size=7)
    words = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocabulary.json"))
    extractor = transformers.Wav2Vec2FeatureExtractor()
    model = transformers.Wav2Vec2ForCTC(config)
    return pipe("automatic-speech-recognition", model, tokenizer=words, feature_extractor=extractor)


def picture() -> Any:
    image = pytest.importorskip("PIL.Image")
    return image.linear_gradient("L").convert("RGB").resize((40, 30))


CLIENTS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Any]]] = {
    "CrossEncoder": (reranker, lambda client: client.predict([("a", text) for text in TEXTS], batch_size=2)),
    "SparseEncoder": (sparse, lambda client: client.encode(TEXTS, convert_to_sparse_tensor=False, batch_size=2)),
    "Router": (routed, lambda client: [client.encode_query(TEXTS), client.encode_document(TEXTS)]),
    "text-classification": (
        lambda _: of_texts("text-classification", "ForSequenceClassification", num_labels=3),
        lambda client: client(TEXTS, top_k=None, batch_size=2),
    ),
    "feature-extraction": (lambda _: of_texts("feature-extraction", "Model"), lambda client: client(TEXTS)),
    "fill-mask": (lambda _: of_texts("fill-mask", "ForMaskedLM"), lambda client: client("one [MASK] more")),
    "token-classification": (
        lambda _: of_texts("token-classification", "ForTokenClassification"),
        lambda client: client(TEXTS, batch_size=3),
    ),
    "image-classification": (
        lambda _: of_images("image-classification", "ForImageClassification"),
        lambda client: client([picture(), picture().rotate(90)], batch_size=2),
    ),
    "image-feature-extraction": (
        lambda _: of_images("image-feature-extraction", "Model"),
        lambda client: client([picture(), picture().rotate(90)]),
    ),
    "speech": (of_speech, lambda client: client.model(**client.feature_extractor(SOUNDS, **AS_TENSORS)).logits),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Clients and what `optimize` makes of them; each is made once, and stays as it is."""

    @cache
    def make(name: str) -> tuple[Any, Any]:
        client = CLIENTS[name][0](tmp_path_factory.mktemp("client"))
        return client, fxopt.optimize(client)

    return make


@pytest.mark.parametrize("name", mostly_nightly(CLIENTS, {*CLIENTS} - {"token-classification"}))
def test_a_client_gives_what_it_gave(name: str, made: Callable[[str], tuple[Any, Any]]) -> None:
    (client, fast), use = made(name), CLIENTS[name][1]
    assert type(fast) is type(client)
    if hasattr(client, "task"):
        assert repr(fast) == repr(client)
    with torch.no_grad():
        found, expected = (torch.utils._pytree.tree_leaves(use(each)) for each in (fast, client))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            numpy.testing.assert_allclose(numpy.asarray(one), numpy.asarray(other), rtol=1e-4, atol=1e-5)
    replaced = [each for each in modules_of(fast) if isinstance(each, fxopt.CapturedModule)]
    assert len(replaced) == 1 + (name == "Router")
    assert not any(isinstance(each, fxopt.CapturedModule) for each in modules_of(client))
    assert any(record.rewrites for each in replaced for record in fxopt.history(each))


def test_a_pipeline_takes_an_optimized_model() -> None:
    model, words = small_bert()
    optimized = fxopt.optimize(model, kwargs=dict(words(TEXTS[:2], padding=True, return_tensors="pt")))
    found, expected = (
        torch.tensor(pipe("feature-extraction", each, tokenizer=words)(TEXTS[1])) for each in (optimized, model)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    config: Any = fxopt.undo(optimized).config
    assert config.hidden_size == model.config.hidden_size


def test_examples_and_calibration_leave_the_model_as_it_was() -> None:
    model, words = small_bert()
    model.seen = []
    model.register_forward_pre_hook(lambda model, args: model.seen.append(len(args)))
    client = pipe("feature-extraction", model, tokenizer=words)
    with_models_replaced(client, lambda model, *_: model, None, lambda stand_in: stand_in(TEXTS))
    assert model.seen == []


def modules_of(client: Any) -> list[torch.nn.Module]:
    return list((client if isinstance(client, torch.nn.Module) else client.model).modules())


def test_the_encoder_of_speech_recognition_is_replaced() -> None:
    sizes = {
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 32))
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        d_model=16,
        vocab_size=200,
        max_source_positions=100,
        max_target_positions=40,
        **sizes,
        **heads,
        **tokens,
        begin_suppress_tokens=None,
    )
    special = ["endoftext", "startoftranscript", "en", "transcribe", "translate", "notimestamps", "nospeech"]
    words = [chr(code) for code in range(33, 126)] + [f"<|{name}|>" for name in special]
    tokens_of = transformers.WhisperTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.max_new_tokens = 5
    extractor = transformers.WhisperFeatureExtractor(chunk_length=2)
    client = pipe("automatic-speech-recognition", model, tokenizer=tokens_of, feature_extractor=extractor)
    fast = fxopt.optimize(client)
    assert isinstance(fast.model.get_encoder(), fxopt.CapturedModule)
    sound = torch.sin(torch.arange(20_000) ** 1.3).numpy()
    assert fast(sound) == client(sound)
    inputs = extractor(sound, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    with torch.no_grad():
        found, expected = (each.model.generate(**inputs, max_new_tokens=8) for each in (fast, client))
    assert found.tolist() == expected.tolist()


def test_folders_of_rerankers_and_pipelines(made: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    """One folder, which both write and both open."""
    client, optimized = made("CrossEncoder")
    for each, name in ((client, "plain"), (optimized, "fast")):
        each.save(str(tmp_path / name))
    pairs = [("a question", text) for text in TEXTS]
    opened = library.CrossEncoder(str(tmp_path / "fast"), device="cpu")
    numpy.testing.assert_allclose(opened.predict(pairs), client.predict(pairs), atol=1e-5)
    classify, plain = (
        transformers.pipeline("text-classification", model=str(tmp_path / name), device="cpu")
        for name in ("fast", "plain")
    )
    assert classify(TEXTS[0])[0]["score"] == pytest.approx(plain(TEXTS[0])[0]["score"], abs=1e-5)
    classify.save_pretrained(tmp_path / "again")
    again = transformers.pipeline("text-classification", model=str(tmp_path / "again"), device="cpu")
    assert again(TEXTS) == classify(TEXTS)


def test_batches_of_texts_in_columns(made: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    """As workers of clusters get them; the pickle that travels to them is small."""
    for each, name in zip(made("feature-extraction"), ("plain", "fast"), strict=True):
        each.save_pretrained(tmp_path / name)
    plain = library.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    expected = plain.encode(TEXTS, normalize_embeddings=True)
    given = fxopt.BatchEncoder(tmp_path / "fast", "sentence", "vector", batch_size=2, normalize_embeddings=True)
    assert torch.get_num_threads() == 1
    pickled = pickle.dumps(given)
    assert len(pickled) < 500
    for encoder in (given, pickle.loads(pickled)):
        batch = {"id": numpy.arange(3), "sentence": numpy.array(TEXTS)}
        found = encoder(batch)
        assert [*found] == ["id", "sentence", "vector"]
        assert [*batch] == ["id", "sentence"]
        numpy.testing.assert_allclose(found["vector"], expected, atol=1e-5)
    assert given.encode([]).shape == (0, 16)
    for many in (tuple(TEXTS), iter(TEXTS), numpy.array(TEXTS, dtype=object)):
        numpy.testing.assert_allclose(given.encode(many, batch_size=1), expected, atol=1e-5)
    for wrong in (None, TEXTS[0], {"sentence": TEXTS}):
        with pytest.raises(fxopt.PreconditionError, match="expected a list or an array of inputs"):
            given.encode(wrong)  # type: ignore[arg-type]  # what a caller may get wrong
    with pytest.raises(fxopt.PreconditionError, match=r"has no column 'sentence', only 'text': .*column="):
        given({"text": TEXTS})
    for row in (None, float("nan"), 7, numpy.zeros(2)):
        with pytest.raises(fxopt.PreconditionError, match=r"row 1 of the batch.*column sentence.*, where a text is"):
            given.encode(["one", row, "two"])


def test_batches_of_pairs(made: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    client, fast = made("CrossEncoder")
    fast.save(str(tmp_path / "fast"))
    encoder = fxopt.BatchEncoder(tmp_path / "fast", ("query", "text"), "score", threads=None)
    found = encoder({"query": TEXTS[::-1], "text": numpy.array(TEXTS, dtype=object)})["score"]
    numpy.testing.assert_allclose(found, client.predict([*zip(TEXTS[::-1], TEXTS, strict=True)]), atol=1e-5)
    numpy.testing.assert_allclose(encoder.encode(numpy.array([TEXTS[::-1], TEXTS]).T), found, atol=1e-6)
    assert encoder.encode([]).shape == (0,)
    for wrong, said in ((TEXTS[0], "a str, where two texts"), ((None, "b"), "a NoneType, where a text is")):
        with pytest.raises(fxopt.PreconditionError, match=f"row 0 of the batch.*{said}"):
            encoder.encode([wrong])
    made("text-classification")[1].save_pretrained(tmp_path / "labels")
    assert fxopt.BatchEncoder(tmp_path / "labels", ("query", "text")).encode([("a", "b")]).shape == (1, 3)


def test_batches_need_a_folder_that_fxopt_wrote_with_vectors_or_scores(
    made: Callable[[str], tuple[Any, Any]], tmp_path: Path
) -> None:
    for path in (tmp_path / "nowhere", stored_bert(tmp_path / "plain")):
        with pytest.raises(
            fxopt.PreconditionError, match="is not a folder that fxopt wrote: make one with `fxopt optim"
        ):
            fxopt.BatchEncoder(path)
    for name, kind in (("SparseEncoder", "SparseEncoder"), ("fill-mask", "BertForMaskedLM")):
        made(name)[1].save_pretrained(str(tmp_path / name))
        with pytest.raises(fxopt.PreconditionError, match=f"holds a {kind}, which gives neither a vector"):
            fxopt.BatchEncoder(tmp_path / name)


def test_what_cannot_be_replaced_is_said(tmp_path: Path) -> None:
    modules, tokenizer = library.sentence_transformer.modules, small_bert()[1]
    static = library.SentenceTransformer(
        modules=[modules.StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=4)], device="cpu"
    )
    with pytest.raises(fxopt.PreconditionError, match="consists of StaticEmbedding, and contains no transformer"):
        fxopt.optimize(static)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer))
    generating = pipe("text-generation", transformers.GPT2LMHeadModel(config), tokenizer=tokenizer)
    with pytest.raises(
        fxopt.PreconditionError, match=r"GPT2LMHeadModel of this pipeline generates.*pipe.model.compile"
    ):
        fxopt.optimize(generating)
    client = of_texts("feature-extraction", "Model")
    with pytest.raises(fxopt.PreconditionError, match="makes its example inputs itself"):
        fxopt.optimize(client, kwargs={"input_ids": torch.ones(2, 3, dtype=torch.int64)})
    client.task = "video-classification"
    with pytest.raises(fxopt.PreconditionError, match="no examples are known for a pipeline of 'video-classification'"):
        fxopt.optimize(client)
    client.model.train()
    with pytest.raises(fxopt.PreconditionError, match="is in training mode, where it is random"):
        fxopt.optimize(client)


def test_what_needs_a_graph_names_the_one_within(made: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    (client, fast), (texts, _) = made("CrossEncoder"), made("feature-extraction")
    graph: Any = next(each for each in modules_of(fast) if isinstance(each, fxopt.CapturedModule))
    optimize: Any = fxopt.optimize
    functions: list[Any] = [fxopt.history, fxopt.undo, lambda each: fxopt.save(each, "x.fxopt")]
    said = r"capture the model first.*a SentenceTransformer or a pipeline has it as `transformers_model` or `model`"
    for found in (fast, client, texts, torch.nn.ReLU()):
        for function in functions:
            with pytest.raises(fxopt.PreconditionError, match=said):
                function(found)
    with pytest.raises(fxopt.PreconditionError, match=r"SentenceTransformer\(...\).*fxopt optimize minilm -o OUT"):
        optimize("minilm")
    (tmp_path / "afile").touch()
    for write in (lambda path: fxopt.save(graph, path), graph.save_pretrained):
        with pytest.raises(fxopt.CaptureError, match="afile"):
            write(tmp_path / "afile" / "x")


def test_adapters_come_and_go_between_calls_of_a_live_model(tmp_path: Path) -> None:
    least = importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION
    peft = pytest.importorskip("peft", minversion=least)
    model = library.SentenceTransformer(stored_bert(tmp_path), device="cpu")
    plain = model.encode(TEXTS)
    model.compile(backend="fxopt", dynamic=True)
    numpy.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-5)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    with_adapter = model.encode(TEXTS)
    model.disable_adapters()
    numpy.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-5)
    model.enable_adapters()
    numpy.testing.assert_allclose(model.encode(TEXTS), with_adapter, atol=1e-5)
    assert any(graph.rewritten for graph in fxopt_compile.history(model))
    eager: Any = fxopt_compile.undo(model)
    numpy.testing.assert_allclose(eager.encode(TEXTS), with_adapter, atol=1e-5)
    assert abs(with_adapter - plain).max() > 1e-3


def test_a_captured_adapter_takes_other_lengths() -> None:
    """An adapter that is on is part of the graph; merged first, its layers are plain, and passes merge them."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_bert()[0], peft.LoraConfig(r=2, target_modules=["query", "value"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)

    def texts(batch: int, length: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(50, (batch, length)), "attention_mask": torch.ones(batch, length).long()}

    captured = fxopt.capture(model, kwargs=texts(2, 6))
    plain = copy.deepcopy(model).merge_and_unload()  # in place, and what is captured shares its weights
    merged = fxopt.MergeLinears()(fxopt.capture(plain, kwargs=texts(2, 6)), expect=1)
    for batch, length in ((1, 9), (3, 4)):
        inputs = texts(batch, length)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            for found in (captured, merged):
                torch.testing.assert_close(found(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def test_the_command_computes_a_stored_dtype_that_is_slow_in_float32(tmp_path: Path) -> None:
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this processor has instructions for float16")
    small_bert()[0].half().save_pretrained(tmp_path / "half")
    arguments = ["optimize", str(tmp_path / "half"), "-p", "merge-linears", "-o", str(tmp_path / "fast")]
    result = CliRunner().invoke(build_app(plain=True), arguments)
    assert result.exit_code == 0, result.output
    assert "compute-in-float32" in result.output
    opened = transformers.AutoModel.from_pretrained(str(tmp_path / "fast"), dtype="auto")
    assert opened.dtype == torch.float32
    assert [record.pass_name for record in fxopt.history(opened)] == ["compute-in-float32", "merge-linears"]
    assert "encoder.layer.0.attention.self.query.weight" in fxopt.undo(opened).state_dict()


def test_a_configuration_that_fxopt_did_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "fxopt (pip install fxopt)", "architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="not in the form that fxopt writes"):
        transformers.AutoModel.from_pretrained(str(tmp_path))
