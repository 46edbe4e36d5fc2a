"""Questions that no head is trained on: what a trained one is measured with."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do I change a flat tyre?",
    "What is the difference between a crocodile and an alligator?",
    "Write a Python function that checks whether a word is a palindrome.",
    "Give me some ideas for a birthday party for a six-year-old.",
    "Why is the sky blue?",
    "I have an exam tomorrow and I cannot sleep. What should I do?",
    "Translate 'Good morning, my friend' into Spanish and French.",
    "What were the causes of the First World War?",
    "Write a polite letter to my landlord about a broken heater.",
    "Suggest a vegetarian dinner that takes less than thirty minutes.",
    "What does a compiler do?",
    "How many continents are there, and what are their names?",
    "Explain the rules of tennis briefly.",
    "My computer is slow. What can I do about it?",
    "Write a haiku about autumn leaves.",
    "What should I consider before I buy a used car?",
    "Describe how a bill becomes a law.",
    "If a train travels 60 miles per hour for 2.5 hours, how far does it go?",
    "Name five inventions of the nineteenth century and their inventors.",
    "Summarize the story of Romeo and Juliet.",
    "What are good habits for staying healthy when working at a desk?",
    "Write a product description for a waterproof backpack.",
)
