"""The three fixed questions of the demo."""

QUESTIONS = {
    "maths": "A baker bakes 36 rolls in the morning and half as many in the afternoon. She sells each "
    "roll for 2 dollars. How much money does she make if she sells all of them?",
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "chat": "Why is the sky blue? Explain it to a child.",
}
