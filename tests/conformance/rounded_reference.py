"""Only for the kit: the independent model with the weights that a quantised base has."""

from engine_plugin_testing.reference import load_reference
from engine_plugin_torch.quantize_model import linear_layers
from engine_plugin_torch.quantized_linear import QuantizedLinear


def nf4(path):
    module = load_reference(path)
    for layer in linear_layers(module, ()).values():
        layer.weight.data = QuantizedLinear(layer.float(), "nf4").weight.double()
    return module.double()
