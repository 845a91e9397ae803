"""Natural-language inference: does a post give evidence of a criterion?"""
