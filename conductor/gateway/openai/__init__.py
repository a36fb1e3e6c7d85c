"""Requests and answers in the format of OpenAI's API."""
