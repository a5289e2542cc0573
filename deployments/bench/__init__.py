"""`drafthouse bench`: loads an OpenAI-compatible server and says how fast it answers."""
