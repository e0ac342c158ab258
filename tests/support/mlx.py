"""Import this before anything that imports MLX: its BLAS is bound when it is loaded."""

from engine.backend import prepare

prepare()
