"""``dpllm epsilon``: the number, its inverse, the table, the prose, and what it refuses."""

import json
from typing import Any

import pytest
from commands import fresh

from dpllm.cli import main
from dpllm.privacy.accounting import dp_sgd_event, epsilon
from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.statement.formatting import limit_text

RUN = ["--dataset-size", "5000", "--batch-size", "100", "--steps", "150", "--delta", "1e-5"]
NOISE = ["--noise-multiplier", "0.8"]
SIZES = {"--dataset-size": "9", "--batch-size": "1", "--steps": "1"}


def ask(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["epsilon", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def refusal(capsys: Any, *arguments: str, code: int) -> str:
    assert main(["epsilon", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return str(err)


def test_the_number_is_the_accountants(capsys: Any) -> None:
    answer = ask(capsys, *RUN, *NOISE)
    assert answer["epsilon"] == epsilon(dp_sgd_event(0.02, 0.8, 150), 1e-5, "zero_out")
    assert 2.9633 - 1e-3 <= answer["epsilon"] <= 2.9633 + 2e-3
    assert answer["accountant"] == "pld"
    assert answer["accountants"]["rdp"] == pytest.approx(3.6226, abs=1e-3)
    assert answer["event"] == dp_sgd_event(0.02, 0.8, 150).to_json()
    assert dict(map(tuple, answer["curve"]))[1e-5] == answer["epsilon"]
    assert [delta for delta, _ in answer["curve"]] == [1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
    assert set(answer["limits"]) == {"tpr_at_fpr_0.001", "tpr_at_fpr_0.01", "auc", "gdp_mu"}
    assert "2.964" in answer["statement"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tpr_at_fpr_0.01", 0.10101, "10.2%"),
        ("tpr_at_fpr_0.001", 0.03, "3%"),
        ("auc", 0.700001, "0.7001"),
        ("gdp_mu", None, "infinite"),
    ],
)
def test_limits_on_an_attacker_are_rounded_up(name: str, value: float | None, text: str) -> None:
    """To the nearest, a card or a plan would promise more than was proved."""
    assert limit_text(name, value) == text


def test_the_table_shows_limits_rounded_up(capsys: Any) -> None:
    limits = ask(capsys, *RUN, *NOISE)["limits"]
    assert main(["epsilon", *RUN, *NOISE]) == 0
    printed = capsys.readouterr().out
    assert all(limit_text(name, value) in printed for name, value in limits.items())


def test_epsilon_without_amplification_is_one_gaussian_an_epoch(capsys: Any) -> None:
    answer = ask(capsys, *RUN, *NOISE)
    assert answer["shuffled"]["epochs"] == 3
    three = SelfComposed(3, Gaussian(0.8))
    assert answer["shuffled"]["epsilon"] == epsilon(three, 1e-5, "zero_out")
    # A group may lie in one batch as a whole.
    pair = SelfComposed(3, Gaussian(0.4))
    assert ask(capsys, *RUN, *NOISE, "--group-size", "2")["shuffled"]["epsilon"] == epsilon(pair, 1e-5, "zero_out")


def test_the_inverse_meets_the_target_and_hardly_less_noise_does(capsys: Any) -> None:
    answer = ask(capsys, *RUN, "--epsilon", "8")
    sigma = answer["noise_multiplier"]
    assert sigma == pytest.approx(0.560556, abs=1e-3)
    assert answer["epsilon"] <= 8.0 == answer["target_epsilon"]
    assert epsilon(dp_sgd_event(0.02, sigma - 1e-3, 150), 1e-5, "zero_out") > 8.0
    assert ask(capsys, *RUN, "--noise-multiplier", str(sigma))["epsilon"] == answer["epsilon"]


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "steps"), [(75, 1, "3", 225), (93, 1, "1", 93), (1000, 300, "0.1", 1), (7, 3, "1/3", 1)]
)
def test_steps_follow_from_epochs_exactly(capsys: Any, size: int, batch: int, epochs: str, steps: int) -> None:
    sizes = ["--dataset-size", str(size), "--batch-size", str(batch), "--noise-multiplier", "4"]
    assert ask(capsys, *sizes, "--epochs", epochs)["num_steps"] == steps


def test_delta_is_automatic(capsys: Any) -> None:
    numbers = ["--dataset-size", "888", "--batch-size", "64", "--steps", "10", "--noise-multiplier", "2"]
    automatic = ask(capsys, *numbers)
    assert automatic["delta"] == 1e-4
    assert len(automatic["curve"]) == 5
    assert len(ask(capsys, *numbers, "--delta", "2e-5")["curve"]) == 6


def test_groups_and_prv_if_asked(capsys: Any) -> None:
    group = ask(capsys, *RUN, "--noise-multiplier", "2", "--group-size", "3")
    assert group["epsilon"] == epsilon(dp_sgd_event(0.02, 2.0, 150, 3), 1e-5, "zero_out")
    assert group["one_unit"] == epsilon(dp_sgd_event(0.02, 2.0, 150), 1e-5, "zero_out") < group["epsilon"]
    assert group["accountants"].keys() == {"pld"}
    assert ask(capsys, *RUN, *NOISE, "--accountant", "prv")["accountants"]["prv"] == pytest.approx(2.9736, abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("gdp",), "understates epsilon"), (("magic",), "Use pld, rdp or prv"), (("prv", "--group-size", "4"), "prv")],
)
def test_another_accountant_is_refused_with_the_reason(capsys: Any, arguments: tuple[str, ...], named: str) -> None:
    assert named in refusal(capsys, *RUN, *NOISE, "--accountant", *arguments, code=2)


def test_a_reader_gets_number_table_limits_and_prose(capsys: Any) -> None:
    assert main(["epsilon", *RUN, *NOISE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("epsilon 2.964\n")
    for words in ("by pld", "by rdp", "if shuffled", "area under the ROC curve", "Poisson sampling", "base model"):
        assert words in out
    assert main(["epsilon", *RUN, "--epsilon", "8", "--group-size", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("noise multiplier 0.")
    assert "of one unit alone" in out


def test_what_has_no_finite_epsilon_is_still_answered(capsys: Any) -> None:
    answer = ask(capsys, *RUN, "--noise-multiplier", "1e-5")
    assert answer["epsilon"] is None
    assert "no guarantee" in answer["statement"]
    assert main(["epsilon", *RUN, "--noise-multiplier", "1e-5"]) == 0
    assert "infinite" in capsys.readouterr().out


def sizes(**changes: str | None) -> tuple[str, ...]:
    """The numbers of a small run, some of them changed, or left out by None."""
    options = SIZES | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return (*(word for name, value in options.items() if value is not None for word in (name, value)), *NOISE)


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        # They would promise nothing.
        *(((*RUN[:-1], delta, *NOISE), "--delta", 3) for delta in ("2e-4", "0.5")),  # 1/N and more
        (sizes(batch_size="10"), "--batch-size 10", 3),
        # They are out of range.
        *(((*RUN[:-1], delta, *NOISE), "--delta", 2) for delta in ("0", "nan", "small")),
        *(((*RUN, "--noise-multiplier", noise), "noise_multiplier", 2) for noise in ("0", "nan")),
        *(((*RUN, "--epsilon", epsilon), "--epsilon", 2) for epsilon in ("-1", "inf")),
        ((*RUN, *NOISE, "--group-size", "0"), "--group-size", 2),
        ((*RUN, *NOISE, "--group-size", "2000"), "group_size", 2),
        *((sizes(**{name: "0"}), f"--{name.replace('_', '-')}", 2) for name in ("dataset_size", "batch_size", "steps")),
        *((sizes(steps=None, epochs=epochs), "--epochs", 2) for epochs in ("0", "many", "1/0")),
        ((*RUN, *NOISE, "--train.seed", "1"), "unknown argument", 2),
        ((*RUN, *NOISE, "--bands", "0"), "--bands", 2),
        ((*RUN, *NOISE, "--bands", "51"), "--bands 50 or less", 3),
        ((*RUN, *NOISE, "--bands", "4", "--group-size", "2"), "--group-size 1", 3),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(
    capsys: Any, arguments: tuple[str, ...], named: str, code: int
) -> None:
    assert named in refusal(capsys, *arguments, code=code).replace("\n", " ")


@pytest.mark.parametrize(
    "arguments",
    [
        [*RUN[2:], *NOISE],
        [*RUN],
        [*RUN, *NOISE, "--epsilon", "3"],
        [*RUN, *NOISE, "--epochs", "3"],
        [*RUN, *NOISE, "--relation", "replace_one"],
    ],
)
def test_too_few_or_too_many_numbers_are_a_wrong_command(capsys: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["epsilon", *arguments])
    assert stopped.value.code == 2


def test_torch_is_not_imported() -> None:
    run, loaded, _ = fresh("epsilon", *RUN, *NOISE)
    assert (run.returncode, loaded) == (0, []), run.stderr
    assert run.stdout.startswith("epsilon 2.964")


def test_bands_cost_fewer_rounds_at_a_larger_rate(capsys: Any) -> None:
    answer = ask(capsys, *RUN, *NOISE, "--bands", "8")
    assert answer["epsilon"] == epsilon(dp_sgd_event(0.16, 0.8, 19), 1e-5, "zero_out")
    assert answer["event"]["type"] == "cyclic_poisson"
    assert answer["shuffled"] is None
    assert "groups take turns" in answer["statement"]
    needed = ask(capsys, *RUN, "--epsilon", "3", "--bands", "8")
    assert needed["epsilon"] <= 3 < ask(capsys, *RUN, *NOISE, "--bands", "8")["epsilon"]
    assert main(["epsilon", *RUN, *NOISE, "--bands", "8"]) == 0
    assert "if shuffled" not in capsys.readouterr().out
