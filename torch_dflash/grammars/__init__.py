"""Grammars that limit answers: JSON schemas, regular expressions and Lark grammars, over tokens."""
