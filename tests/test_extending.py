"""The examples of docs/extending.md: they are taken from the page, imported and run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TAPS, make_drafter, teach
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from teaching import counting_batch, counting_prompts
from test_sampling import LookedUpTarget, law_of_decoding, law_of_the_target, look_up, small_drafter
from test_sampling import target as three_token_target  # noqa: F401 a fixture

import dloop_train.checkpoints
from dloop_train.checkpoints.files import check_export, layout_modules, load_drafter, read_config, save_drafter
from dloop_train.config import CONF, Config, from_hydra
from dloop_train.decoding.gates import DLoop
from dloop_train.decoding.loop import decode
from dloop_train.decoding.replay import replay, walk_gate
from dloop_train.phases import artifacts, generate
from dloop_train.runs import read_jsonl
from dloop_train.targets.head import TargetHead
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_spec, load_target
from dloop_train.training.anchors import draw_origins
from dloop_train.training.unroll import Terms, Unroll

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
LENGTH = 24


PATH = r"(?:# @package _global_\n)?# ([\w/]+\.(?:py|yaml))\b"
"""How a file begins: a comment with its path, after Hydra's own header if it has one."""


def files_of(page: str) -> dict[str, str]:
    """Path -> text of the files in the fenced blocks."""
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, re.M | re.S)
    starts = [[found.start() for found in re.finditer(f"^{PATH}", block, re.M)] for block in blocks]
    parts = [
        block[start:end]
        for block, found in zip(blocks, starts, strict=True)
        for start, end in zip(found, [*found[1:], None], strict=True)
    ]
    return {re.match(PATH, part)[1]: part for part in parts}


FILES = files_of(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the page, with their modules importable."""
    folder, known = tmp_path_factory.mktemp("extending"), list(dloop_train.checkpoints.__path__)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    dloop_train.checkpoints.__path__[:] = known
    for name in FILES:
        if name.endswith(".py"):
            sys.modules.pop(Path(name).stem, None)
            sys.modules.pop(f"dloop_train.checkpoints.{Path(name).stem}", None)


def config_of(folder, *overrides) -> Config:
    """The Config of a command line with --config-dir."""
    places = [f"hydra.searchpath=[file://{folder / 'my_conf'}]", "name=test", f"root={folder / 'artifacts'}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", overrides=[*places, *overrides])
    return from_hydra(OmegaConf.create(OmegaConf.to_container(tree, resolve=True)))


def sum_drafter(folder, target):
    """The page's drafter for a target in float64, randomly initialised with conftest's scales, and its settings."""
    settings = config_of(folder, "+drafter=sum", "+target=small").drafter
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = settings.build(settings.shape(target.spec, TAPS), TargetHead.of(target))
        for name, parameter in drafter.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return drafter.double().eval(), settings


def text_of(target, drafter, gate, prompt, **settings):
    emissions = list(decode(target, drafter, gate, prompt, max_new_tokens=LENGTH, **settings))
    return [token for each in emissions for token in each.tokens], [each.round for each in emissions if each.round]


def test_the_page_has_all_files():
    modules = {"my_gate", "my_rule", "my_prompts", "my_responder", "my_drafter", "my_layouts/sum_chain"}
    assert {f"{name}.py" for name in modules} | {
        f"my_conf/{name}.yaml"
        for name in (
            *("gate/budget", "rule/capped", "prompts/sums", "responder/greedy", "target/small", "drafter/sum"),
            "pair/sum_small",
        )
    } == set(FILES)


def test_the_first_command_runs(folder):
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").replace("$PWD", str(folder))
    words = re.search(r"^    python (.*dry_run=true)$", page, re.M)[1].split()
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name in ("Budget", "Capped", "Sums", "Greedy", "SumConfig"):
        assert f"({name})" in done.stdout


def test_the_gate_is_lossless_and_replayed(folder, tiny_target):
    gate, drafter = (
        config_of(folder, "+drafter=sum", "+target=small", "gate=budget").gate,
        make_drafter("eagle3-reduced", tiny_target),
    )
    deeper = type(gate)(lowest=-40.0, max_stages=4)
    stages = []
    for prompt in counting_prompts(3).tolist():
        for each in (gate, deeper):
            text, rounds = text_of(tiny_target, drafter, each, prompt)
            assert text == decode_plain(tiny_target, prompt, max_new_tokens=LENGTH)
            stages += [round.stages for round in rounds]
            depth = {"stages": 1, "deepest": each.max_stages, "floor": each.floor([])}
            record = replay(tiny_target, drafter, prompt, text, max_new_tokens=LENGTH, **depth)
            assert [r.stages for r in walk_gate(record, each)] == [r.stages for r in rounds]
    assert max(stages) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rule_keeps_the_targets_distribution(folder, three_token_target, temperature):  # noqa: F811
    chosen = ("+drafter=sum", "+target=small", "rule=capped")
    rule = config_of(folder, *chosen, "++rule.most=1", f"++rule.temperature={temperature}").rule
    model, drafter = LookedUpTarget(three_token_target), look_up(small_drafter("eagle3-deepspec", three_token_target))
    gate = DLoop(threshold=-2.0, max_stages=3)
    with torch.inference_mode():
        if temperature == 0:
            assert text_of(three_token_target, drafter, gate, [1, 0, 1], rule=rule)[0] == decode_plain(
                three_token_target, [1, 0, 1], max_new_tokens=LENGTH
            )
            return
        rounds = []
        found = law_of_decoding(model, drafter, gate, rule, 4, rounds)
        wanted = law_of_the_target(three_token_target, temperature, 4)
    assert found.keys() == wanted.keys() and max(abs(found[text] - wanted[text]) for text in wanted) < 1e-12
    assert max(round.accepted for round in rounds) == 1 < max(round.drafted for round in rounds)


def test_prompts_responder_and_target_generate(folder):
    short = ("++generate.max_new_tokens=6", "++generate.greedy_prompts=1", "++generate.greedy_max_new_tokens=6")
    chosen = ("prompts=sums", "++prompts.limit=6", "responder=greedy", *short)
    config = config_of(folder, "+drafter=sum", "+target=small", *chosen)
    prompts = config.prompts.read()
    assert {prompt.split for prompt in prompts} == {"train", "validation", "test"}
    assert type(config.prompts)(name="sums", below=21).settings() != type(config.prompts)(name="sums").settings()
    generate.run(config)
    rows, target = read_jsonl(artifacts.responses(config).folder / "train.jsonl"), load_target(config.target)
    assert len(list(rows)) == 6
    for row in rows:
        assert row["response_ids"] == decode_plain(target, row["prompt_ids"], max_new_tokens=6)


def test_the_target_is_read(folder):
    config = config_of(folder, "+drafter=eagle3", "+target=small", "++drafter.init=scratch", "prompts=builtin")
    spec = load_spec(config.target)
    assert (spec.name, spec.num_layers, spec.hidden_size) == ("small", 4, 32)


def test_the_drafter_learns_and_is_lossless(folder):
    target = teach("tiny_llama")
    drafter, _ = sum_drafter(folder, target)
    unroll, batch = Unroll(drafter, Terms(2), max_rows=1000), counting_batch(target, drafter.shape.feature_spec)
    optimiser, losses = torch.optim.AdamW(drafter.parameters(), lr=1e-2), []
    for step in range(40):
        origins = draw_origins(batch, drafter.k, count=8, depth_exposure=2, seed=0, epoch=step)
        losses.append(unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss)
        optimiser.zero_grad()
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]
    accepted = []
    for prompt in counting_prompts(3).tolist():
        text, rounds = text_of(target, drafter, DLoop(threshold=-12.0, max_stages=3), prompt)
        assert text == decode_plain(target, prompt, max_new_tokens=LENGTH)
        accepted += [round.accepted for round in rounds]
    assert max(accepted) > drafter.k  # some second stage was accepted


def test_the_layout_saves_and_loads(folder, tiny_target, tmp_path):
    drafter, settings = sum_drafter(folder, tiny_target)
    save_drafter(drafter, tmp_path / "first", section={}, target=tiny_target.spec)
    check_export(tmp_path / "first", drafter, settings)
    again = load_drafter(tmp_path / "first", settings, drafter.head, target=tiny_target.spec, taps=TAPS)
    save_drafter(again, tmp_path / "second", section={}, target=tiny_target.spec)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    config = read_config(tmp_path / "first")
    assert [name for name, layout in layout_modules().items() if layout.matches(config)] == ["sum_chain"]
