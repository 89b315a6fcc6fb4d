"""A model of an SGLang replica, a simulated SGLang server over it, and what drives them."""
