"""engine-plugin-megatron: training over many ranks with megatron-core. The engine is in ``engine``, what models are made of in ``models``."""
