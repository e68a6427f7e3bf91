"""One request from its check to a worker that has it: admission, input, choice of a worker, and its end."""
