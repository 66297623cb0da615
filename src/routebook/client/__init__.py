"""A typed client: generates over HTTP and gives back the routed experts of every token. Needs httpx."""

from routebook.client.async_client import AsyncClient, AsyncGenerationStream
from routebook.client.client import Client, GenerationStream
from routebook.client.config import ClientConfig
from routebook.client.openai_answers import read_openai
from routebook.client.outputs import Choice, ChoiceDelta, Generation, GenerationChunk

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Choice",
    "ChoiceDelta",
    "Client",
    "ClientConfig",
    "Generation",
    "GenerationChunk",
    "GenerationStream",
    "read_openai",
]
