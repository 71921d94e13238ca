"""SpeechRecognition's `recognize_openai`, by base URL alone. Run by test_clients.py in its environment.

speechrecognition_client.py RECORDING BASE_URL
"""

import os
import sys

import speech_recognition

recording, base_url = sys.argv[1:]
os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
with speech_recognition.AudioFile(recording) as source:
    recognizer = speech_recognition.Recognizer()
    audio = recognizer.record(source)
print("text:", recognizer.recognize_openai(audio))
