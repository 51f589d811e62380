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


def test_another_measure_takes_the_place_of_bleu() -> None:
    validations = [{"step": 15, "loss": 2.5, "f1": 0.25}, {"step": 30, "loss": 2.1, "f1": 0.5, "best": True}]
    loss, score = plot_curve(TRAINING, validations, "f1", "nats per text").axes
    assert (loss.get_ylabel(), score.get_title()) == ("nats per text", "Validation F1")
    assert score.lines[0].get_xydata().tolist() == [[15, 0.25], [30, 0.5]]
    assert score.get_legend_handles_labels()[1] == ["best: 0.50"]


def test_without_a_measure_the_best_is_that_of_the_loss() -> None:
    (loss,) = plot_curve(TRAINING, VALIDATIONS, None).axes
    assert loss.get_legend_handles_labels()[1] == ["training", "validation", "best: 2.10"]
    # A loss that is not finite has no place in the picture.
    unknown = [{"step": 15, "loss": None, "best": True}]
    assert plot_curve(TRAINING, unknown, None).axes[0].get_legend_handles_labels()[1] == ["training"]


def test_the_picture_of_a_curve_is_always_the_same() -> None:
    assert curve_picture(TRAINING, VALIDATIONS).startswith(b"\x89PNG")
    assert curve_picture(TRAINING, VALIDATIONS) == curve_picture(TRAINING, VALIDATIONS)


def test_each_of_several_sets_has_its_curve() -> None:
    validations = [
        {"step": 0, "loss": 3.0, "bleu": 5.0, "sets": {"law": {"bleu": 1.0, "loss": 4.0}, "web": {"bleu": 9.0}}},
        {
            "step": 10,
            "loss": 2.0,
            "bleu": 7.0,
            "best": True,
            "sets": {"law": {"bleu": 6.0, "loss": None}, "web": {"bleu": 8.0, "loss": 1.0}},
        },
    ]
    loss, bleu = plot_curve(TRAINING, validations).axes
    found = {line.get_label(): line.get_xydata().tolist() for line in bleu.lines}
    assert found == {"law": [[0, 1], [10, 6]], "web": [[0, 9], [10, 8]], "best: update 10": [[10, 0], [10, 1]]}
    # Earlier versions wrote no loss of each set.
    found = {line.get_label(): line.get_xydata().tolist() for line in loss.lines}
    assert found == {"training": [[10, 3], [30, 2]], "law": [[0, 4]], "web": [[10, 1]]}
