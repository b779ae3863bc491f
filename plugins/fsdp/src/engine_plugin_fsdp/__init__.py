"""engine-plugin-fsdp: training on several ranks with FSDP2. The engine is in ``engine``, its options in ``options``."""
