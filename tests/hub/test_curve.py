"""The curve of a model card has the points of the run's logs."""

from hf_vaswani.hub.curve import curve_picture, plot_curve

TRAINING = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": None}, {"step": 30, "loss": 2.0}]
VALIDATIONS = [
    {"step": 15, "loss": 2.5, "bleu": 9.0, "best": False},
    {"step": 30, "loss": 2.1, "bleu": 12.5, "best": True},
]


def test_the_curve_has_every_finite_point() -> None:
    loss, bleu = plot_curve(TRAINING, VALIDATIONS).axes
    assert [line.get_xydata().tolist() for line in loss.lines] == [[[10, 3], [30, 2]], [[15, 2.5], [30, 2.1]]]
    assert bleu.lines[0].get_xydata().tolist() == [[15, 9.0], [30, 12.5]]
    assert bleu.get_legend_handles_labels()[1] == ["best: 12.50"]


def test_without_validations_there_is_one_panel() -> None:
    (loss,) = plot_curve(TRAINING, []).axes
    assert loss.get_ylabel() == "nats per target token"


def test_the_picture_of_a_curve_is_always_the_same() -> None:
    assert curve_picture(TRAINING, VALIDATIONS).startswith(b"\x89PNG")
    assert curve_picture(TRAINING, VALIDATIONS) == curve_picture(TRAINING, VALIDATIONS)
