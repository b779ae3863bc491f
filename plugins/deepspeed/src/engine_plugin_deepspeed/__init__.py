"""engine-plugin-deepspeed: training over several ranks with DeepSpeed ZeRO. The engine is in ``engine``, its option table in ``options``."""
