"""Routes of other speech servers, behind the request path of OpenAI's: clients move here by address alone.

One module for each server. Each renames fields to OpenAI's and gives the reply its server's form; none
transcribes anything itself. Installed by `app.py`; runs in the API process.
"""
