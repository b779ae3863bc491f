"""engine-plugin-fsdp: training over several ranks with FSDP2. The engine is in ``engine``, its option table in ``options``."""
