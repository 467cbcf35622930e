"""Our GPT: one trunk with a language-model head or a classification head.

Input: a `GPTConfig` and a random generator. Output: a model that trains, generates text, and can be
exported to or imported from the Hugging Face GPT-2 format.
"""
