"""The version of this project: ``setup.py`` reads it here, and so does every program, installed or not."""

VERSION = "0.3.0.dev0"
