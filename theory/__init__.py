"""What the bounds on softmax stability say, in symbols (sympy) and in numbers (numpy, log domain)."""
