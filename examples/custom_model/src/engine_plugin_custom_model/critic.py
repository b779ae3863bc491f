"""``plugins = ["critic"]``: for PPO, a critic that is the ordinary model with a value head."""

from torch import nn

from engine_core import hookimpl


class Critic(nn.Module):
    def __init__(self, model):
        super().__init__()
        size = model.config.hidden_size
        self.base, self.head = model.model, nn.Linear(size, 1, bias=False)
        nn.init.normal_(self.head.weight, std=1 / size)

    def forward(self, input_ids, position_ids=None):
        return self.head(self.base(input_ids=input_ids, position_ids=position_ids)[0])[..., 0]


@hookimpl
def engine_build_model(role, model_config):
    from engine_plugin_torch.model_loading import load_changed_model

    return load_changed_model(model_config, Critic) if role == "critic" else None
