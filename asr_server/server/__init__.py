"""Put the API, realtime sessions and Wyoming together, and run them in the API process."""
