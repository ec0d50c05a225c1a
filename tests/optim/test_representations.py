"""An optimizer tells by which call it was made, with its chain and hyperparameters."""

from fmegatron import optim
from fmegatron.optim.transform import Transform


def test_the_usual_ones():
    text = "adamw(learning_rate=0.001, b1=0.9, b2=0.99, eps=1e-08, weight_decay=0.1)"
    assert repr(optim.adamw(1e-3, b2=0.99)) == text
    assert repr(optim.averaged(optim.adamw(1e-3, b2=0.99), decay=0.5)) == f"averaged(opt={text}, decay=0.5)"
    assert repr(optim.sgd(optim.settable(0.5))).startswith("sgd(learning_rate=Settable(first=0.5)")
    assert "peak=0.5" in repr(optim.lion(optim.cosine(0.5, total=10)))
    assert "decay=test_the_usual_ones" in repr(optim.adamw(1.0, decay=test_the_usual_ones))


def test_a_chain_of_ones_own():
    opt = optim.optimizer(adam=optim.scale_by_adam(b2=0.999), rate=optim.scale_by_learning_rate(0.1))
    chain = "adam=scale_by_adam(b1=0.9, b2=0.999, eps=1e-08), rate=scale_by_learning_rate(learning_rate=0.1)"
    assert repr(opt) == f"optimizer({chain})"
    assert repr(Transform(lambda p: {}, lambda g, s, p, c: (g, s))) == f"Transform of {__name__}"
    assert repr(optim.Optimizer(opt.init, opt.update)) == "Optimizer of fmegatron.optim.from_transforms"
