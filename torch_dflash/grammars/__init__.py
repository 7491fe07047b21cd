"""What an answer may say: JSON schemas, regular expressions and Lark grammars, token by token."""
