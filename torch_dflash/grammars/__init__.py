"""Grammars for answers: JSON schemas, regular expressions and Lark grammars, token by token."""
