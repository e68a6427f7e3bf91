"""One output on its way from the pool to its caller: tokens to text, pieces, stop strings, slow readers."""
