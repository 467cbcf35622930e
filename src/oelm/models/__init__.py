"""oelm's own GPT, with a language-model head or a classification head.

Input: a `GPTConfig` and a random generator. Output: a model that can be trained, can generate text, and can
be exported to Hugging Face formats (GPT-2 or GPT-NeoX) or imported from GPT-2.
"""
