import tests.support.mlx  # noqa: F401 - before anything imports MLX
