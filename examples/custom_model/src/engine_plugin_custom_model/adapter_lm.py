"""The model of the folder with a small trained matrix product behind each feed-forward block."""

from torch import nn

from engine_plugin_torch.model_loading import load_changed_model

RANK = 8


class WithAdapter(nn.Module):
    """A feed-forward block ``inner``, and ``up @ down`` of what it gives added to it; at first that adds nothing."""

    def __init__(self, inner, hidden_size):
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(hidden_size, RANK, bias=False)
        self.up = nn.Linear(RANK, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden):
        out = self.inner(hidden)
        return out + self.up(self.down(out))


def build(model_config):
    """The model of ``[model]`` with its adapters: from a folder of the ordinary model, or from an export of this one."""
    return load_changed_model(model_config, add_adapters)


def add_adapters(model):
    for layer in model.model.layers:
        layer.mlp = WithAdapter(layer.mlp, model.config.hidden_size)


def merged(weights):
    """The weights of the ordinary model: each adapter merged into the layer before it, no layer held longer than it takes."""
    held = {}
    for name, weight in weights:
        layer, _, part = name.partition(".mlp.")
        if part in ("inner.down_proj.weight", "down.weight"):
            held[part] = weight
        elif part == "up.weight":
            before, down = held.pop("inner.down_proj.weight"), held.pop("down.weight")
            yield f"{layer}.mlp.down_proj.weight", before + weight @ (down @ before)
        else:
            yield name.replace(".mlp.inner.", ".mlp."), weight
