"""LangChain's audio loader, by base URL alone. Run by test_clients.py in LangChain's own environment.

langchain_client.py FOLDER BASE_URL
"""

import sys

import imageio_ffmpeg
from langchain_community.document_loaders.blob_loaders import FileSystemBlobLoader
from langchain_community.document_loaders.generic import GenericLoader
from langchain_community.document_loaders.parsers.audio import OpenAIWhisperParser
from pydub import AudioSegment

folder, base_url = sys.argv[1:]
AudioSegment.converter = imageio_ffmpeg.get_ffmpeg_exe()  # the parser sends mp3

for response_format in (None, "verbose_json", "text"):
    parser = OpenAIWhisperParser(api_key="none", base_url=base_url, response_format=response_format)
    loader = GenericLoader(FileSystemBlobLoader(folder, glob="*.wav"), parser)
    (document,) = loader.load()
    print("document:", document.page_content)
